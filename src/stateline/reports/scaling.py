"""How scores depend on the size of the models, where an architecture has several sizes."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from stateline.charts.chart import Axis, Chart
from stateline.charts.lines import Line, Point, line_chart
from stateline.reports.axes import score_axis
from stateline.reports.format import words
from stateline.reports.records import drawn_models, families, runs_of, score
from stateline.reports.series import middle
from stateline.runs.results import Results, TaskRecord

FIT_SIZES = 4
"""Fewest sizes for a fit."""


class PowerLaw(NamedTuple):
    """A fit of ``score = factor * size ** -exponent`` in logarithms.

    Attributes:
        exponent: How fast the score falls.
        error: Standard error of the exponent.
        factor: The score at size 1.
    """

    exponent: float
    error: float
    factor: float


def power_law(sizes: Sequence[float], scores: Sequence[float]) -> PowerLaw:
    """Fit a power law by least squares in logarithms.

    Example:
        >>> power_law([10, 100, 1000], [1.0, 0.1, 0.01])
        PowerLaw(exponent=1.0, error=0.0, factor=10.0)
    """
    x, y = [math.log10(size) for size in sizes], [math.log10(score) for score in scores]
    slope, intercept = statistics.linear_regression(x, y)
    squares = sum((b - slope * a - intercept) ** 2 for a, b in zip(x, y, strict=True))
    spread = (len(x) - 1) * statistics.variance(x)
    error = math.sqrt(squares / max(1, len(x) - 2) / spread)
    return PowerLaw(round(-slope, 12), round(error, 12), round(10**intercept, 12))


def scaling_charts(results: Results, task: TaskRecord, name: str) -> list[Chart]:
    """The score at the training length by the number of parameters; none without several sizes."""
    lines, fits = [], []
    look = drawn_models(results)
    members: dict[str, list[str]] = {}
    for model, family in families(results).items():
        members.setdefault(family, []).append(model)
    for family, models in members.items():
        points = _points(results, models, task)
        if len(points) > 1:
            lines.append(Line(look[models[0]]._replace(name=family), points))
            fits += _fit(family, points, task)
    if not lines:
        return []
    metric = words(task.metric)
    axes = (
        Axis("parameters", "log10", form="~s"),
        score_axis(task, f"{metric} at length {task.train_length}"),
    )
    note = " ".join(["Median over seeds, with a band from lowest to highest.", *fits])
    title = f"{metric.capitalize()} by size"
    return [line_chart(f"{name}-by-size", title, note, lines, axes)]


def _points(results: Results, models: Sequence[str], task: TaskRecord) -> list[Point]:
    points = []
    for model in models:
        if runs := runs_of(results, model, task):
            scores = [score(run, task, task.train_length) for run in runs]
            points.append(Point(runs[0].parameters, scores))
    return sorted(points)


def _fit(family: str, points: Sequence[Point], task: TaskRecord) -> list[str]:
    """A sentence on the fit of a score that falls with size; none of too few sizes."""
    found = [(point.x, value) for point in points if (value := middle(point.values)) > 0]
    if task.higher_is_better or len(found) < FIT_SIZES:
        return []
    law = power_law(*zip(*found, strict=True))
    return [
        f"“{family}”: proportional to parameters to the power "
        f"{-law.exponent:.3f} ± {law.error:.3f} (standard error, {len(found)} sizes)."
    ]
