"""The data of a report's charts: what the runs of a model measured, by length, position or step."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Literal

from stateline.charts.lines import Line, Point
from stateline.reports.records import measured, runs_of, scores_of
from stateline.runs.results import Results, TaskRecord

STEPS = 60
"""Most points of a learning curve."""

MEDIAN = (
    "Median over seeds, with a band from lowest to highest; during training, a seed that has "
    "stopped keeps its last value."
)
"""The note below charts of scores of several seeds: what their lines and bands are."""


def over_seeds(lines: Sequence[Line]) -> list[str]:
    """The note on medians and bands, if any point of the lines has several seeds."""
    return [MEDIAN] if any(len(point.values) > 1 for own in lines for point in own.points) else []


def by_length(results: Results, model: str, task: TaskRecord) -> list[Point]:
    """The metric by length; beyond the training length, only seeds that solved the task count."""
    lengths = sorted(task.eval_lengths)
    found = [(n, scores_of(results, task, n, [model]).get(model)) for n in lengths]
    return [Point(length, scores) for length, scores in found if scores]


def by_position(results: Results, model: str, task: TaskRecord) -> list[Point]:
    """The metric by position in a row, at the positions that all seeds have."""
    return _shared([run.by_position for run in runs_of(results, model, task) if run.by_position])


def by_bits(results: Results, model: str, task: TaskRecord) -> list[Point]:
    """The metric by bits per number of the state."""
    return _shared([found.by_bits for found in measured(results, model, task)])


def by_step(
    results: Results, model: str, task: TaskRecord, field: Literal["loss", "metric"]
) -> list[Point]:
    """The loss or the metric during training; a seed that has stopped keeps its last value."""
    curves = [
        [(point.step, y) for point in run.curve if (y := getattr(point, field)) is not None]
        for run in runs_of(results, model, task)
    ]
    curves = [curve for curve in curves if len(curve) > 1]
    if not curves:
        return []
    first = max(curve[0][0] for curve in curves)
    steps = sorted({step for curve in curves for step, _ in curve if step >= first})
    kept = _thinned(steps)
    ends = {curve[-1][0] for curve in curves}
    return [Point(s, [_held(c, s) for c in curves], s in ends or s == kept[-1]) for s in kept]


def _shared(records: Sequence[Mapping[int, float | None]]) -> list[Point]:
    """The values of all seeds at the places that all seeds have."""
    places = set(records[0]).intersection(*records[1:]) if records else set()
    values = {place: [record[place] for record in records] for place in sorted(places)}
    return [Point(x, [math.nan if y is None else y for y in own]) for x, own in values.items()]


def _thinned(steps: Sequence[int]) -> list[int]:
    """At most :data:`STEPS` of the steps, evenly; the first and the last among them."""
    stride = math.ceil(len(steps) / STEPS)
    return sorted({*steps[::stride], steps[-1]})


def _held(curve: Sequence[tuple[int, float]], step: int) -> float:
    """The last value of a curve up to a step."""
    return curve[bisect_right(curve, step, key=lambda point: point[0]) - 1][1]
