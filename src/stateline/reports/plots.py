"""The content of the plots of a report; their style is in ``drawing``."""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from stateline.reports.costs import STATE, Cost, cost_lengths
from stateline.reports.drawing import colour, ink, line_style
from stateline.reports.format import words
from stateline.reports.records import measured, runs_of, score, solved_runs
from stateline.runs.results import Results, TaskRecord


class Line(NamedTuple):
    """The points of one model, and their style."""

    x: Sequence[int | float]
    y: Sequence[float]
    style: dict[str, Any]


def by_length(axes: Axes, results: Results, task: TaskRecord) -> None:
    """The metric against length: median and spread; faint and dashed if unsolved."""
    lengths = sorted(task.eval_lengths)
    lines = []
    for index, model in enumerate(results.models):
        runs = runs_of(results, model, task)
        solved = solved_runs(runs, task)
        if not runs:
            continue
        scores = [[score(run, task, length) for run in solved or runs] for length in lengths]
        dashed = {} if solved else {"linestyle": (0, (4, 3)), "alpha": 0.45}
        lines.append(_median(axes, index, lengths, scores, dashed))
    _draw(axes, lines)
    _length_axis(axes, lengths, "length, in the task's unit")
    axes.set_ylabel(words(task.metric))
    _levels(axes, task)
    _trained_here(axes, task)


def by_position(axes: Axes, results: Results, task: TaskRecord) -> None:
    """The metric against the position in a row: median and spread over the seeds."""
    lines, ends = [], {task.train_length}
    for index, model in enumerate(results.models):
        losses = positions(results, model, task)
        if losses:
            lines.append(_median(axes, index, list(losses), list(losses.values()), {}))
            ends.update(losses)
    _draw(axes, lines)
    _length_axis(axes, sorted(ends), "position (tokens)")
    axes.set_ylabel(words(task.metric))
    _trained_here(axes, task)


def positions(results: Results, model: str, task: TaskRecord) -> dict[int, list[float]]:
    """The scores of a model's seeds by position, in order; positions that all seeds have."""
    records = [run.by_position for run in runs_of(results, model, task) if run.by_position]
    shared = set(records[0]).intersection(*records[1:]) if records else set()
    return {end: [_number(r[end]) for r in records] for end in sorted(shared)}


def by_bits(axes: Axes, results: Results, task: TaskRecord) -> None:
    """The metric against the bits per number of the state: median and spread over the seeds."""
    lines = []
    for index, model in enumerate(results.models):
        records = [found.by_bits for found in measured(results, model, task)]
        shared = set(records[0]).intersection(*records[1:]) if records else set()
        if bits := sorted(shared):
            scores = [[record[b] for record in records] for b in bits]
            lines.append(_median(axes, index, bits, scores, {}))
    _draw(axes, lines)
    axes.set_xlabel("bits per number of the state")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylabel(f"{words(task.metric)} at length {task.train_length}")
    _levels(axes, task)


def by_keyword(
    axes: Axes, results: Results, keyword: str, tasks: Mapping[int | float, TaskRecord]
) -> None:
    """The metric at the training length against a keyword of the task: median and spread."""
    lines = []
    for index, model in enumerate(results.models):
        runs = {value: runs_of(results, model, task) for value, task in sorted(tasks.items())}
        scores = {
            value: [score(run, tasks[value], tasks[value].train_length) for run in own]
            for value, own in runs.items()
            if own
        }
        if scores:
            lines.append(_median(axes, index, list(scores), list(scores.values()), {}))
    _draw(axes, lines)
    axes.set_xlabel(keyword)
    axes.xaxis.set_major_locator(FixedLocator(sorted(tasks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    some = next(iter(tasks.values()))
    axes.set_ylabel(f"{words(some.metric)} at the trained length")
    _levels(axes, some)


def learning_curve(axes: Axes, results: Results, task: TaskRecord, field: str) -> None:
    """``"loss"`` or ``"metric"`` against the training step: a line per seed with its end marked."""
    for index, model in enumerate(results.models):
        for points in curves(results, model, task, field):
            thin = line_style(index) | {"linewidth": 1.0, "alpha": 0.85}
            axes.plot(*zip(*points, strict=True), **thin, markevery=[len(points) - 1])
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    if field == "loss":
        axes.set_ylabel("training loss (nats per token)")
    else:
        axes.set_ylabel(f"{words(task.metric)} at length {task.train_length}")
        _levels(axes, task)


def curves(
    results: Results, model: str, task: TaskRecord, field: str
) -> list[list[tuple[int, float]]]:
    """Step and value for each seed of a model that has at least two values."""
    runs = runs_of(results, model, task)
    found = [[(p.step, getattr(p, field)) for p in run.curve] for run in runs]
    taken = [[point for point in points if point[1] is not None] for points in found]
    return [points for points in taken if len(points) > 1]


def cost_by_length(axes: Axes, results: Results, cost: Cost) -> None:
    """A cost against length, both on logarithmic axes."""
    lines = []
    for entry in results.speed:
        values = cost.values(entry)
        lengths = sorted(values)
        style = line_style(results.models.index(entry.model))
        lines.append(Line(lengths, [values[length] for length in lengths], style))
    _draw(axes, lines)
    axes.set_yscale("log")
    locator = LogLocator(2, numticks=6) if cost is STATE else LogLocator(10, subs=(1, 2, 3, 5))
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: cost.text(value)))
    _widen(axes)
    axes.set_ylabel(cost.unit)
    _length_axis(axes, cost_lengths(results, cost), cost.length)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _median(
    axes: Axes,
    index: int,
    x: Sequence[int | float],
    scores: Sequence[Sequence[float]],
    changes: Mapping[str, Any],
) -> Line:
    """Draw the spread of the scores, and return their median as a line to be drawn later."""
    lowest, highest = [min(s) for s in scores], [max(s) for s in scores]
    axes.fill_between(x, lowest, highest, color=colour(index), alpha=0.15, linewidth=0)
    return Line(x, [statistics.median(s) for s in scores], {**line_style(index), **changes})


def _trained_here(axes: Axes, task: TaskRecord) -> None:
    """A vertical line at the training length."""
    axes.axvline(task.train_length, color=ink(), linewidth=0.8, alpha=0.6, zorder=1)
    axes.annotate(
        "trained",
        (task.train_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
    )


def _draw(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw lines over one another; a line that is covered by others is wider, so that it shows."""
    wider = min(2.0, 8 / max(len(lines), 1))
    for rank, line in enumerate(lines):
        beneath = sum(_coincide(line, other) for other in lines[rank + 1 :])
        style = line.style | {
            "linewidth": line.style["linewidth"] + wider * beneath,
            "markersize": line.style["markersize"] + 1.25 * wider * beneath,
        }
        axes.plot(line.x, line.y, **style)


def _coincide(line: Line, other: Line) -> bool:
    near = partial(math.isclose, rel_tol=0.005, abs_tol=0.005)
    return line.x == other.x and all(map(near, line.y, other.y))


def _length_axis(axes: Axes, lengths: Sequence[int], label: str) -> None:
    """A base-2 logarithmic axis with a tick at each length that fits."""
    axes.set_xscale("log", base=2)
    gap = math.log2(lengths[-1] / lengths[0]) / 8
    ticks = list(lengths[-1:])
    for length in reversed(lengths[:-1]):
        if math.log2(ticks[-1] / length) >= gap:
            ticks.append(length)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:.0f}"))
    axes.set_xlabel(label)


def _levels(axes: Axes, task: TaskRecord) -> None:
    """Labelled horizontal lines at the score that counts as solved and at the baselines."""
    solved = {} if task.solved_at is None else {"solved": task.solved_at}
    levels: Mapping[str, float] = solved | task.baselines
    for rank, (name, value) in enumerate(sorted(levels.items(), key=lambda level: level[1])):
        axes.axhline(value, color=ink(), linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        side = "center" if len(levels) == 1 else "bottom" if rank else "top"
        axes.annotate(
            f"{name} {value:.3g}",
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va=side,
        )
    low, high = axes.get_ylim()
    if task.higher_is_better and low > -0.1 and high < 1.1:
        axes.set_ylim(-0.03, 1.03)


def _widen(axes: Axes) -> None:
    """Let a logarithmic axis span at least a factor of four, so that it has several ticks."""
    low, high = axes.get_ylim()
    spare = max(1.0, math.sqrt(4 * low / high))
    axes.set_ylim(low / spare, high * spare)
