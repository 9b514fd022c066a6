"""Whether new runs of a table agree with its record."""

import math
from typing import Literal, NamedTuple

from stateline.errors import InputError
from stateline.papers.record import RecordedRow, TableRecord
from stateline.papers.show import NONE, cell, number
from stateline.runs.verdict import limit, two_sided

RATE = 0.01
"""Probability that a new value from the same distribution is called outside."""

Agreement = Literal["equal", "within", "outside", "no spread"]


class Verified(NamedTuple):
    """A new value beside the recorded ones.

    Attributes:
        row: Name of the row.
        column: Heading of the column.
        recorded: The recorded values in words.
        seed: The seed of the new run.
        now: The new value; ``None`` if there is none.
        agreement: ``equal`` to the recorded value of this seed to four digits; ``within`` the range
            that the spread of the recorded seeds predicts; ``outside`` it; ``no spread`` if the
            value differs and only one seed was recorded, or a seed has no value.
    """

    row: str
    column: str
    recorded: str
    seed: int
    now: float | None
    agreement: Agreement


def verify(record: TableRecord, fresh: TableRecord) -> list[Verified]:
    """Compare every value of new runs with the recorded values of its row.

    A new value x is ``within`` if Student's t of x - mean, with the recorded deviation times
    sqrt(1 + 1 / n) for n seeds, is not rarer than :data:`RATE`.
    """
    rows, verified = {row.name: row for row in record.rows}, []
    for row in fresh.rows:
        for column, heading in enumerate(fresh.columns):
            if row.name not in rows or heading not in record.columns:
                raise InputError(f"nothing is recorded of {row.name}, {heading}")
            old, place = rows[row.name], record.columns.index(heading)
            for seed, now in zip(row.seeds, row.values[column], strict=True):
                agreement = _agreement(old, place, seed, now)
                then = cell(old, place)
                verified.append(Verified(row.name, heading, then, seed, now, agreement))
    return verified


def power(shift: float, seeds: int) -> float:
    """Probability that a value is called outside if its mean has moved.

    Args:
        shift: How far, in standard deviations over seeds.
        seeds: Number of recorded seeds.

    With the recorded deviation s, in units of the true one, it is the probability that a normal
    variable of mean ``shift`` / r and deviation 1 is beyond t s, averaged over s, where r is
    sqrt(1 + 1 / n) for n seeds.

    Example:
        >>> round(power(5.0, 3), 2), round(power(5.0, 10), 2)
        (0.18, 0.9)
    """
    freedom, away = seeds - 1, shift / math.sqrt(1 + 1 / seeds)
    t = limit(RATE, freedom)
    places = [(i + 0.5) / 500 for i in range(2500)]
    weights = [s ** (freedom - 1) * math.exp(-freedom * s * s / 2) for s in places]
    beyond = (
        (math.erfc((t * s - away) / math.sqrt(2)) + math.erfc((t * s + away) / math.sqrt(2))) / 2
        for s in places
    )
    return sum(w * p for w, p in zip(weights, beyond, strict=True)) / sum(weights)


def _agreement(old: RecordedRow, column: int, seed: int, now: float | None) -> Agreement:
    then = dict(zip(old.seeds, old.values[column], strict=True))
    if seed in then and _shown(then[seed]) == _shown(now):
        return "equal"
    spread, count = old.spread(column), len(old.seeds)
    if spread is None or count < 2 or now is None:
        return "no spread"
    if spread.deviation == 0:
        return "outside"
    t = abs(now - spread.mean) / (spread.deviation * math.sqrt(1 + 1 / count))
    return "outside" if two_sided(t, count - 1) < RATE else "within"


def _shown(value: float | None) -> str:
    return NONE if value is None else number(value)
