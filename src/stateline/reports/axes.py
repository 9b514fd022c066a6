"""The axes of a report's charts."""

import math
from collections.abc import Sequence
from typing import Literal

from stateline.charts.chart import Axis
from stateline.reports.costs import Cost
from stateline.reports.format import short_bytes, words
from stateline.runs.results import TaskRecord

TICKS = 6
"""Largest number of ticks of a cost axis."""

STEPS = ([1, 1.5, 2, 3, 4, 5, 7], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1])
"""Multiples of powers of ten that may have ticks, from the densest to the sparsest set."""

NARROWEST = 4.0
"""Smallest ratio of the two ends of a cost axis."""


def score_axis(task: TaskRecord, title: str = "") -> Axis:
    """The axis of a task's metric: from 0 to 1 if it is a share."""
    solvable = task.solved_at is not None and task.higher_is_better and task.solved_at <= 1
    domain = (0.0, 1.0) if solvable or "accuracy" in task.metric else None
    return Axis(title or words(task.metric), domain=domain)


def cost_axis(cost: Cost, values: Sequence[float], title: str = "") -> Axis:
    """The logarithmic axis of a cost; bytes have ticks at powers of two."""
    low, high = min(values), max(values)
    spare = max(1.0, math.sqrt(NARROWEST * low / high))
    low, high = low / spare, high * spare
    if cost.text is short_bytes:
        ticks = _few(_powers(low, high, 2, [1.0]))
    else:
        finest = [_powers(low, high, 10, steps) for steps in STEPS]
        ticks = next((found for found in finest if len(found) <= TICKS), _few(finest[-1]))
    texts = {tick: cost.text(tick) for tick in ticks}
    scale: Literal["log2", "log10"] = "log2" if cost.text is short_bytes else "log10"
    return Axis(title or cost.unit, scale, (low, high), texts)


def _powers(low: float, high: float, base: int, steps: Sequence[float]) -> list[float]:
    """The multiples of the powers of a base between two ends."""
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    ticks = [step * float(base) ** power for power in powers for step in steps]
    return [tick for tick in ticks if low <= tick <= high]


def _few(ticks: Sequence[float]) -> Sequence[float]:
    """Every second tick, or third and so on, until there are few enough."""
    return ticks[:: math.ceil(len(ticks) / TICKS)] if ticks else []
