"""The axes of a report's charts."""

import math
from collections.abc import Sequence

from stateline.charts.chart import Axis
from stateline.reports.costs import Cost
from stateline.reports.format import short_bytes, words
from stateline.runs.results import TaskRecord

TICKS = 6
"""Most ticks of an axis of costs."""

NARROWEST = 4.0
"""Least ratio of the ends of an axis of costs."""


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
    in_bytes = cost.text is short_bytes
    ticks = _powers(low, high, 2, (1,)) if in_bytes else _powers(low, high, 10, (1, 2, 5))
    texts = {tick: cost.text(tick) for tick in ticks}
    return Axis(title or cost.unit, "log2" if in_bytes else "log10", (low, high), texts)


def _powers(low: float, high: float, base: int, steps: Sequence[int]) -> list[float]:
    """Multiples of powers of a base between two ends; fewer powers until they are few enough."""
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    for stride in range(1, last - first + 2):
        ticks = [
            step * float(base) ** power
            for power in range(first, last + 1, stride)
            for step in steps
        ]
        found = [tick for tick in ticks if low <= tick <= high]
        if len(found) <= TICKS:
            break
        steps = (1,)
    return found
