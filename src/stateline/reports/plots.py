"""The plots of a report, as SVG that takes its colours from the page around it.

Text and axes are drawn in the page's text colour, and model number i in the page's ``--model-i``:
one drawing serves a light page and a dark one. Nothing here touches pyplot or lasting settings.
"""

import html
import io
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from stateline.reports.format import words
from stateline.reports.summary import STATE, Cost, Record, cost_lengths, runs_of, score, solved_runs

PLOT_SIZE = (3.6, 2.6)
KEY_SIZE = (0.36, 0.16)

_INK = "#010203"
_MODELS = [f"#0102f{index}" for index in range(8)]
_MARKERS = "os^DvPX*"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stateline",
    "text.parse_math": False,
    "font.size": 8,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.5,
}


class Line(NamedTuple):
    """The points of one model, and how they look."""

    x: Sequence[int]
    y: Sequence[float]
    style: dict[str, Any]


def svg(
    draw: Callable[[Axes], None], name: str, label: str, size: tuple[float, float] = PLOT_SIZE
) -> str:
    """Draw one plot.

    Args:
        draw: Draws on empty axes.
        name: Unlike that of any other plot of the page; the ids in the SVG begin with it.
        label: What a reader who does not see the plot should know of it.
        size: Width and height in inches; text is 8 points high.

    Returns:
        An ``<svg>`` element, the same for the same drawing, that names nothing outside itself.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        file = io.StringIO()
        nothing = dict.fromkeys(["Date", "Creator", "Format", "Type"])
        figure.savefig(file, format="svg", metadata=nothing, transparent=True)
    return _inline(file.getvalue(), name, label)


def _inline(document: str, name: str, label: str) -> str:
    """An SVG document as an element of a page that holds others."""
    text = document[document.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"| font-family: [^;"]*;', "", text)
    text = re.sub(r'<g id="[^"]*"', "<g", text).replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", text)
    text = re.sub('^<svg width="[^"]*" height="[^"]*"', "", text)
    for index, colour in enumerate(_MODELS):
        text = text.replace(colour, f"var(--model-{index})")
    text = text.replace(_INK, "currentColor")
    return f'<svg role="img" aria-label="{html.escape(label)}"{text}'


def key(axes: Axes, index: int) -> None:
    """A short piece of the line of one model, for legends."""
    axes.set_axis_off()
    axes.set_position((0, 0, 1, 1))
    axes.set_xlim(0, 2)
    axes.plot([0, 1, 2], [0, 0, 0], **_style(index), markevery=[1], clip_on=False)


def by_length(axes: Axes, results: Record, task: Record) -> None:
    """The metric against length: median and spread, faint and dashed where it is not solved."""
    lengths = sorted(task["eval_lengths"])
    lines = []
    for index, model in enumerate(results["models"]):
        runs = runs_of(results, model, task)
        solved = solved_runs(runs, task)
        if not runs:
            continue
        scores = [[score(run, task, length) for run in solved or runs] for length in lengths]
        style = {} if solved else {"linestyle": (0, (4, 3)), "alpha": 0.45}
        medians = [statistics.median(s) for s in scores]
        lines.append(Line(lengths, medians, _style(index) | style))
        lowest, highest = [min(s) for s in scores], [max(s) for s in scores]
        axes.fill_between(lengths, lowest, highest, color=_colour(index), alpha=0.15, linewidth=0)
    _draw(axes, lines)
    _length_axis(axes, lengths, "length, as the task counts it")
    axes.set_ylabel(words(task["metric"]))
    _levels(axes, task)
    axes.axvline(task["train_length"], color=_INK, linewidth=0.8, alpha=0.6, zorder=1)
    axes.annotate(
        "trained",
        (task["train_length"], 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
    )


def learning_curve(axes: Axes, results: Record, task: Record, field: str) -> None:
    """``"loss"`` or ``"metric"`` against the training step, a line per seed, marked at its end."""
    for index, model in enumerate(results["models"]):
        for run in runs_of(results, model, task):
            points = [(p["step"], p[field]) for p in run["curve"] if p[field] is not None]
            style = _style(index) | {"linewidth": 1.0, "alpha": 0.85}
            if points:
                axes.plot(*zip(*points, strict=True), **style, markevery=[len(points) - 1])
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    if field == "loss":
        axes.set_ylabel("training loss (nats per token)")
    else:
        axes.set_ylabel(f"{words(task['metric'])} at length {task['train_length']}")
        _levels(axes, task)


def cost_by_length(axes: Axes, results: Record, cost: Cost) -> None:
    """A cost against length, both on logarithmic axes."""
    lines = []
    for entry in results["speed"]:
        values = {int(length): value for length, value in entry[cost.field].items()}
        lengths = sorted(values)
        style = _style(results["models"].index(entry["model"]))
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


def _colour(index: int) -> str:
    return _MODELS[index % len(_MODELS)]


def _style(index: int) -> dict[str, Any]:
    """How the line of one model looks; shapes move on where the colours begin again."""
    turn, place = divmod(index, len(_MODELS))
    return {
        "color": _colour(index),
        "marker": _MARKERS[(place + turn) % len(_MARKERS)],
        "markersize": 4.5,
        "markeredgewidth": 0,
        "linewidth": 1.4,
    }


def _draw(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw lines over one another; one that others coincide with is wider and shows beneath."""
    for rank, line in enumerate(lines):
        beneath = sum(_coincide(line, other) for other in lines[rank + 1 :])
        style = line.style | {
            "linewidth": line.style["linewidth"] + 2 * beneath,
            "markersize": line.style["markersize"] + 2.5 * beneath,
        }
        axes.plot(line.x, line.y, **style)


def _coincide(line: Line, other: Line) -> bool:
    near = partial(math.isclose, rel_tol=0.005, abs_tol=0.005)
    return line.x == other.x and all(map(near, line.y, other.y))


def _length_axis(axes: Axes, lengths: Sequence[int], label: str) -> None:
    """A base-2 logarithmic axis with a tick at each length that finds room."""
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


def _levels(axes: Axes, task: Record) -> None:
    """Horizontal lines at the score that counts as solved and at the baselines, named beside."""
    solved = {} if task["solved_at"] is None else {"solved": task["solved_at"]}
    levels: Mapping[str, float] = solved | task["baselines"]
    for rank, (name, value) in enumerate(sorted(levels.items(), key=lambda level: level[1])):
        axes.axhline(value, color=_INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        side = "center" if len(levels) == 1 else "bottom" if rank else "top"
        axes.annotate(
            f"{name} {value:g}",
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va=side,
        )
    low, high = axes.get_ylim()
    if task["higher_is_better"] and low > -0.1 and high < 1.1:
        axes.set_ylim(-0.03, 1.03)


def _widen(axes: Axes) -> None:
    """Let a logarithmic axis span at least a factor of four, so that it has ticks to read."""
    low, high = axes.get_ylim()
    spare = max(1.0, math.sqrt(4 * low / high))
    axes.set_ylim(low / spare, high * spare)
