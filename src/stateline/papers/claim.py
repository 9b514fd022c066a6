"""A claim of a paper as inequalities between recorded figures, and the verdict that follows.

A :class:`Statement` says that a figure is above or below another one, or a number. It is judged by
Welch's t-test of the difference of the means over seeds, two-sided, at the error rate of its claim
divided by the number of its statements (Bonferroni). Figures of one row in two columns come from
the same runs, so the differences of each seed are tested. One seed decides nothing.

In tables of updates, a seed without a figure has never reached the score. It counts with the number
of its updates, which is a lower bound.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple

import msgspec

from stateline.errors import InputError
from stateline.papers.record import RecordedRow, TableRecord
from stateline.papers.show import cell, number
from stateline.runs.verdict import two_sided

RATE = 0.05
"""Probability that a claim of equal models has a statement that is decided."""

Outcome = Literal["holds", "opposite", "undecided"]

Verdict = Literal["reproduced", "in part", "contradicted", "no power"]


class Statement(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A figure against another: ``of`` is above (or below) ``times`` x the other ``+ by``.

    Attributes:
        of: Name of a row.
        above: Name of the row that it is above, or a number; one of ``above`` and ``below``.
        below: The same if it is below.
        column: Heading of the figure's column; by default the first.
        against: Heading of the other figure's column; by default the same.
        times: Factor of the other figure.
        by: What is added to it.
    """

    of: str
    above: float | str | None = None
    below: float | str | None = None
    column: str = ""
    against: str = ""
    times: float = 1.0
    by: float = 0.0

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise ValueError("a statement needs one of above and below")
        if self.other == self.of and not self.against:
            raise ValueError("a row is compared to itself only in another column: add against")

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
        words: The inequality with both figures.
        outcome: Whether it holds, its opposite holds, or the seeds do not decide.
        chance: Probability of such a difference, or a larger one, between equal models.
    """

    words: str
    outcome: Outcome
    chance: float


def judge_all(statements: Sequence[Statement], record: TableRecord) -> list[Judged]:
    """Judge the statements of a claim.

    Raises:
        InputError: If the record has no row or column of a name.
    """
    return [judge(statement, record, RATE / len(statements)) for statement in statements]


def judge(statement: Statement, record: TableRecord, rate: float = RATE) -> Judged:
    """Judge a statement.

    Args:
        statement: The statement.
        record: The recorded table.
        rate: Probability that it is decided although the difference is zero.

    Raises:
        InputError: If the record has no row or column of a name.
    """
    rows = {row.name: row for row in record.rows}
    first = _Figures.of(rows, statement.of, record.columns, statement.column)
    sign = 1.0 if statement.below is None else -1.0
    heading = statement.against or statement.column
    second = None
    told = number(statement.other) if isinstance(statement.other, float) else ""
    if isinstance(statement.other, str):
        second = _Figures.of(rows, statement.other, record.columns, heading)
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
        outcome = "undecided"  # the smaller figure is a lower bound only
    side = "above" if sign > 0 else "below"
    place = statement.column or record.columns[0]
    if statement.against:
        told += f", {statement.against}"
    said = f"{place}: {statement.of} ({first.words}) {side} {told}"
    return Judged(said, outcome, chance)


def verdict(judged: Sequence[Judged], lacks: Sequence[str] = ()) -> Verdict:
    """The verdict on a claim; its first statement is its headline.

    - contradicted: the opposite of the headline holds, or that of another statement while none
      holds;
    - no power: otherwise, if the headline is not decided;
    - reproduced: all statements hold, and the record lacks no part of the claim;
    - in part: the headline holds, and not all of the others, or a part was not measured.

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


class _Figures(NamedTuple):
    """The figures of a row over its seeds; ``reached`` says that none is a lower bound."""

    values: list[float]
    reached: bool
    words: str

    @classmethod
    def of(
        cls, rows: Mapping[str, RecordedRow], name: str, columns: Sequence[str], heading: str
    ) -> "_Figures":
        heading = heading or columns[0]
        if name not in rows or heading not in columns:
            raise InputError(f"the record has no figure of {name}, {heading}")
        row, column = rows[name], columns.index(heading)
        found = row.values[column]
        bound = row.updates if heading.startswith("updates") else None
        missing = math.nan if bound is None else float(bound)
        values = [missing if value is None else value for value in found]
        return cls(values, None not in found, cell(row, column))


def _compare(
    statement: Statement, first: Sequence[float], second: Sequence[float] | None
) -> tuple[float, float]:
    """How far the figures are above the others on average, and the chance of that."""
    if second is None:
        return _test([value - float(statement.other) - statement.by for value in first])
    goal = [statement.times * value + statement.by for value in second]
    if statement.of == statement.other:
        return _test([a - b for a, b in zip(first, goal, strict=True)])
    return _test(first, goal)


def _test(*samples: Sequence[float]) -> tuple[float, float]:
    """The mean of a sample, or the difference of two means, and its chance if it were zero.

    The chance is 1 where nothing is known: a sample of one seed, or one that lacks a figure.
    """
    difference = fmean(samples[0]) - sum(map(fmean, samples[1:]))
    if min(map(len, samples)) < 2 or not math.isfinite(difference):
        return difference, 1.0
    parts = [(stdev(own) ** 2 / len(own), len(own) - 1) for own in samples]
    square = sum(part for part, _ in parts)
    if difference == 0 or square == 0:
        return difference, 1.0 if difference == 0 else 0.0
    freedom = square**2 / sum(part**2 / free for part, free in parts)
    return difference, two_sided(abs(difference) / math.sqrt(square), freedom)
