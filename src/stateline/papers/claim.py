"""A claim of a paper as inequalities between recorded values, and the verdict that follows.

A :class:`Statement` says that a value is above or below another one, or a number. It is judged by
Welch's t-test of the difference of the means over seeds, two-sided, at the error rate of its claim
divided by the number of its statements (Bonferroni), and by the number of looks if seeds were added
because earlier ones decided nothing. The tests are those of :mod:`stateline.runs.verdict`. Values
of one row in two columns come from the same runs, so the differences of each seed are tested. One
seed decides nothing.

A statement may be about the share of seeds that solve a task (``share``). Then Barnard's exact test
gives the chance, or, against a number, the exact binomial test.

In tables of updates, a seed without a value has never reached the score. It counts with the number
of its updates, which is a lower bound.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from stateline.errors import InputError
from stateline.papers.record import TableRecord
from stateline.papers.show import cell, number, share
from stateline.runs.verdict import ERROR_RATE, barnard, welch

Outcome = Literal["holds", "opposite", "undecided"]

Verdict = Literal["reproduced", "in part", "contradicted", "no power"]


class Statement(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A value against another: ``of`` is above (or below) ``times`` x the other ``+ by``.

    Attributes:
        of: Name of a row.
        above: Name of the row that it is above, or a number; one of ``above`` and ``below``.
        below: The same if it is below.
        column: Heading of the value's column; by default the first.
        against: Heading of the other row's column; by default the same.
        times: Factor of the other row's value.
        by: Number that is added to the product.
        share: Compare the shares of seeds that have solved the task, from 0 to 1, instead of the
            values; the record says for the column what counts as solved.
    """

    of: str
    above: float | str | None = None
    below: float | str | None = None
    column: str = ""
    against: str = ""
    times: float = 1.0
    by: float = 0.0
    share: bool = False

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise ValueError("a statement needs one of above and below")
        if self.other == self.of and not self.against:
            raise ValueError("a row is compared to itself only in another column: add against")
        if self.share and (self.times, self.by, self.against) != (1.0, 0.0, ""):
            raise ValueError("shares are compared as they are: leave out times, by and against")
        if not isinstance(self.other, str) and (self.times, self.against) != (1.0, ""):
            raise ValueError("times and against are for another row, not for a number: leave both")

    @property
    def other(self) -> str | float:
        """The other row or the number."""
        found = self.below if self.above is None else self.above
        assert found is not None
        return found

    @property
    def numbers(self) -> list[float]:
        """The numbers of the statement."""
        return [self.times, self.by, *([self.other] if isinstance(self.other, float) else [])]

    @property
    def reversed(self) -> "Statement":
        """The opposite statement."""
        return msgspec.structs.replace(self, above=self.below, below=self.above)


class Judged(NamedTuple):
    """A statement with its outcome.

    Attributes:
        words: The inequality with both values.
        outcome: Whether it holds, its opposite holds, or the seeds do not decide.
        chance: Probability of such a difference, or a larger one, between equal models.
    """

    words: str
    outcome: Outcome
    chance: float


def rate_of(statements: Sequence[Statement], looks: int = 1) -> float:
    """The error rate of each statement of a claim that was judged so often.

    Over all statements and looks it is :data:`~stateline.runs.verdict.ERROR_RATE`.
    """
    return ERROR_RATE / len(statements) / looks


def judge_all(statements: Sequence[Statement], record: TableRecord, looks: int = 1) -> list[Judged]:
    """Judge the statements of a claim."""
    rate = rate_of(statements, looks)
    return [judge(statement, record, rate) for statement in statements]


def judge(statement: Statement, record: TableRecord, rate: float = ERROR_RATE) -> Judged:
    """Judge a statement.

    Args:
        statement: The statement.
        record: The recorded table.
        rate: Probability that it is decided although the difference is zero.
    """
    first = _Values.of(record, statement.of, statement.column, shares=statement.share)
    sign = 1.0 if statement.below is None else -1.0
    heading = statement.against or statement.column
    second = None
    told = number(statement.other) if isinstance(statement.other, float) else ""
    if isinstance(statement.other, str):
        second = _Values.of(record, statement.other, heading, shares=statement.share)
        told = f"{statement.other} ({second.words})"
        told = told if statement.times == 1 else f"{number(statement.times)} x {told}"
    if statement.by:
        told += f" {'+' if statement.by > 0 else '-'} {number(abs(statement.by))}"
    difference, chance = _compare(statement, first.values, second.values if second else None)
    outcome: Outcome = "undecided"
    if chance < rate:
        outcome = "holds" if sign * difference > 0 else "opposite"
    smaller = first if difference < 0 else second
    if smaller is not None and not smaller.reached:
        outcome = "undecided"  # the smaller value is only a lower bound
    side = "above" if sign > 0 else "below"
    place = statement.column or record.columns[0]
    done = "seeds that solve" if record.unit == "seeds" else "exact answers"
    place = f"share of {done}, {place}" if statement.share else place
    if statement.against:
        told += f", {statement.against}"
    said = f"{place}: {statement.of} ({first.words}) {side} {told}"
    return Judged(said, outcome, chance)


def verdict(judged: Sequence[Judged], lacks: Sequence[str] = ()) -> Verdict:
    """The verdict on a claim; its first statement is its headline.

    - contradicted: the opposite of the headline holds, or no statement holds and the opposite of
      some statement does;
    - no power: otherwise, if the headline is not decided;
    - reproduced: all statements hold, and the record lacks no part of the claim;
    - in part: the headline holds, but not all of the others, or a part was not measured.

    Args:
        judged: The statements of the claim.
        lacks: Parts of the claim that the record does not measure.
    """
    outcomes = [own.outcome for own in judged]
    if "opposite" in outcomes and (outcomes[0] == "opposite" or "holds" not in outcomes):
        return "contradicted"
    if outcomes[0] == "undecided":
        return "no power"
    return "in part" if lacks or {*outcomes} != {"holds"} else "reproduced"


class _Values(NamedTuple):
    """The value of each seed of a row, or whether the seed has solved the task (0 or 1).

    ``reached`` is true if no value is a lower bound.
    """

    values: list[float]
    reached: bool
    words: str

    @classmethod
    def of(cls, record: TableRecord, name: str, heading: str, *, shares: bool) -> "_Values":
        rows = {row.name: row for row in record.rows}
        heading = heading or record.columns[0]
        if name not in rows or heading not in record.columns:
            raise InputError(f"the record has no figure of {name}, {heading}")
        row, column = rows[name], record.columns.index(heading)
        found = row.values[column]
        if shares:
            if heading not in record.solved:
                raise InputError(f"the record does not say from which {heading} a seed has solved")
            good = [float(record.solves(heading, value)) for value in found]
            return cls(good, True, share(int(sum(good)), len(good), record.unit))
        bound = row.updates if heading.startswith("updates") else None
        missing = math.nan if bound is None else float(bound)
        values = [missing if value is None else value for value in found]
        return cls(values, None not in found, cell(row, column))


def _compare(
    statement: Statement, first: Sequence[float], second: Sequence[float] | None
) -> tuple[float, float]:
    """The mean difference of the values, and its chance if it were zero."""
    if statement.share:
        return _test_shares(first, float(statement.other) if second is None else second)
    if second is None:
        return welch([value - float(statement.other) - statement.by for value in first])
    goal = [statement.times * value + statement.by for value in second]
    if statement.of == statement.other:
        return welch([a - b for a, b in zip(first, goal, strict=True)])
    return welch(first, goal)


def _test_shares(first: Sequence[float], second: Sequence[float] | float) -> tuple[float, float]:
    """The difference of two shares, or of a share and a number, and its chance if it were zero."""
    solved, n = int(sum(first)), len(first)
    if not isinstance(second, float):
        difference = fmean(first) - fmean(second)
        return difference, barnard((solved, n), (int(sum(second)), len(second)))
    ways = [math.comb(n, k) * second**k * (1 - second) ** (n - k) for k in range(n + 1)]
    return solved / n - second, sum(way for way in ways if way <= ways[solved] * (1 + 1e-9))
