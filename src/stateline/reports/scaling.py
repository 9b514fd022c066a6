"""How scores depend on the size of the models, where an architecture has several sizes."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import altair as alt

from stateline.charts.chart import Axis, Chart, by_model, opacity, own_rows
from stateline.charts.lines import Line, Point, line_chart
from stateline.charts.style import ModelStyle
from stateline.reports.axes import score_axis
from stateline.reports.format import words
from stateline.reports.records import drawn_models, families, middle, runs_of, task_label
from stateline.reports.series import over_seeds
from stateline.runs.judged import score
from stateline.runs.results import Results, TaskRecord

FIT_SIZES = 4
"""Fewest sizes for a fit."""

DRAWN_AT = 20
"""Points of the curve of a fit."""


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

    def __call__(self, size: float) -> float:
        """The score of the fit at a size."""
        return self.factor * size**-self.exponent


class Fit(NamedTuple):
    """A power law over the sizes of a family."""

    family: str
    sizes: Sequence[float]
    law: PowerLaw


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
    """The score at the training length by the number of parameters; none without several sizes.

    Scores that fall with size have a fit, drawn dashed, where there are enough sizes.
    """
    look = drawn_models(results)
    members: dict[str, list[str]] = {}
    for model, family in families(results).items():
        members.setdefault(family, []).append(model)
    lines = [
        Line(look[models[0]]._replace(name=family), _points(results, models, task))
        for family, models in members.items()
    ]
    lines = [line for line in lines if len(line.points) > 1]
    if not lines:
        return []
    metric = words(task.metric)
    axes = (
        Axis("parameters", "log10", form="~s"),
        score_axis(task, f"{metric} at length {task.train_length}"),
    )
    fits = [fit for line in lines if (fit := _fit(line, task))]
    notes = [*over_seeds(lines), *("Dashed: fits." for _ in fits[:1]), *map(_sentence, fits)]
    title = f"{task_label(results, task)}: {metric} by size"
    chart = line_chart(f"{name}-by-size", title, notes, lines, axes)
    return [chart._replace(layers=[*chart.layers, *_dashed(chart.models, fits, axes)])]


def _points(results: Results, models: Sequence[str], task: TaskRecord) -> list[Point]:
    points = []
    for model in models:
        if runs := runs_of(results, model, task):
            scores = [score(run, task, task.train_length) for run in runs]
            points.append(Point(runs[0].parameters, scores))
    return sorted(points)


def _fit(line: Line, task: TaskRecord) -> Fit | None:
    """The fit of a score that falls with size; ``None`` for other scores and too few sizes."""
    found = [(point.x, value) for point in line.points if (value := middle(point.values)) > 0]
    if task.higher_is_better or len(found) < FIT_SIZES:
        return None
    sizes, scores = zip(*found, strict=True)
    return Fit(line.model.name, sizes, power_law(sizes, scores))


def _sentence(fit: Fit) -> str:
    """A fit in words."""
    return (
        f"“{fit.family}”: proportional to parameters to the power {-fit.law.exponent:.3f} "
        f"± {fit.law.error:.3f} (standard error, {len(fit.sizes)} sizes)."
    )


def _dashed(
    models: Sequence[ModelStyle], fits: Sequence[Fit], axes: tuple[Axis, Axis]
) -> list[alt.Chart]:
    """The curves of the fits, over the sizes that they were made from."""
    x, y = axes
    rows = []
    for fit in fits:
        first, ratio = min(fit.sizes), max(fit.sizes) / min(fit.sizes)
        for place in range(DRAWN_AT):
            size = first * ratio ** (place / (DRAWN_AT - 1))
            rows.append({"model": fit.family, "x": size, "y": fit.law(size)})
    line = own_rows(rows).mark_line(strokeDash=[5, 4], clip=True, opacity=opacity(0.8))
    at = {"x": x.encode(alt.X, "x"), "y": y.encode(alt.Y, "y")}
    return [line.encode(**at, color=by_model(models)["color"])] if fits else []
