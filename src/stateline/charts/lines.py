"""Charts of lines: one per model, with a band over its seeds or rounds."""

import math
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import altair as alt

from stateline.charts.chart import Axis, Chart, Datum, by_model, numbers, opacity, own_rows
from stateline.charts.labels import LONGEST, spread_out
from stateline.charts.style import HEIGHT, INK, ModelStyle

OUTLIER_GAP = 0.5
"""Smallest gap, as a share of the range of all values, that separates outliers."""

MOST_OUTLIERS = 0.25
"""Largest share of the values that may be called outliers."""


class Point(NamedTuple):
    """A point of a line: its place, and the median and the spread of the values measured there.

    Attributes:
        x: Length, step or size.
        values: One per seed that did not diverge (NaN); or a median with two quartiles.
        marked: Whether to draw a mark, which shows that something was measured exactly there.
    """

    x: float
    values: Sequence[float]
    marked: bool = True


class Line(NamedTuple):
    """The points of one model, in order of x."""

    model: ModelStyle
    points: Sequence[Point]


class Level(NamedTuple):
    """A labelled line across a chart: vertical at an x, or horizontal at a y."""

    text: str
    x: float | None = None
    y: float | None = None


def line_chart(
    name: str,
    title: str,
    notes: Sequence[str],
    lines: Sequence[Line],
    axes: tuple[Axis, Axis],
    levels: Sequence[Level] = (),
    spread: tuple[str, str] = ("lowest", "highest"),
) -> Chart:
    """A chart of lines.

    Values that would squash all others are drawn at the edge as triangles, and a note names them.

    Args:
        name: Unique in a report; also the name of its files.
        title: What is plotted against what.
        notes: How to read it, in sentences.
        lines: The lines; the later is drawn over the earlier.
        axes: Of x and of y.
        levels: Lines across the chart.
        spread: What the ends of the bands are.
    """
    x, y = axes
    drawn = [line for line in lines if line.points]
    rows = [row for rank, line in enumerate(drawn) for row in _rows(line, drawn[rank + 1 :])]
    models = [line.model for line in drawn]
    drawn_at = [row[end] for row in rows for end in ("low", "y", "high")]
    drawn_at += [level.y for level in levels if level.y is not None]
    if y.scale == "linear" and not y.domain and drawn_at:
        y = y._replace(domain=limits(drawn_at))
    y = y.over(drawn_at) if drawn_at else y
    beyond = [lv for lv in levels if lv.y is not None and not _within(lv.y, y.domain)]
    outside = [row for row in rows if not _within(row["y"], y.domain)]
    for row in outside:
        row |= {"inside": 0, "marked": 0}
    layers = [*_lines(models, rows, (x, y)), *_marks(models, rows, (x, y), spread)]
    layers += _levels([level for level in levels if level not in beyond], (x, y))
    notes = [*notes, *(f"Off the scale: {level.text}." for level in beyond)]
    if outside:
        layers += _outside(models, outside, (x, y))
        named = ", ".join(f"{r['model']} {r['y']:.4g} at {r['x']:,g}" for r in outside[:4])
        more = f" and {len(outside) - 4} more" if len(outside) > 4 else ""
        notes = [*notes, f"Off the scale, drawn as triangles: {named}{more}."]
    return Chart(name, title, tuple(notes), models, rows, layers)


def limits(values: Sequence[float]) -> tuple[float, float] | None:
    """The ends of an axis that leaves far outliers out; ``None`` if there are no such outliers.

    Outliers are the few values beyond a gap that is wider than the range of all others.

    Example:
        >>> limits([2.0, 2.1, 2.2, 2.3, 2.1, 2.4, 2.2, 2.3, 9.0])
        (1.98, 2.42)
        >>> limits([2.0, 2.1, 2.2, 2.3, 2.1, 2.4, 2.2, 2.3]) is None
        True
    """
    ordered = sorted(values)
    gaps = [high - low for low, high in pairwise(ordered)]
    if len(ordered) < 8 or max(gaps) <= OUTLIER_GAP * (ordered[-1] - ordered[0]):
        return None
    below, above = ordered[: gaps.index(max(gaps)) + 1], ordered[gaps.index(max(gaps)) + 1 :]
    inside, outliers = (below, above) if len(above) <= len(below) else (above, below)
    spare = 0.05 * (inside[-1] - inside[0])
    if len(outliers) > MOST_OUTLIERS * len(ordered) or spare == 0:
        return None
    return inside[0] - spare, inside[-1] + spare


def _within(value: float, domain: tuple[float, float] | None) -> bool:
    """Whether an axis shows a value; without a domain it shows all."""
    return domain is None or domain[0] <= value <= domain[1]


def _rows(line: Line, above: Sequence[Line]) -> list[Datum]:
    """The rows of a line; a line that others cover is wider, so that it stays visible."""
    beneath = sum(_coincide(line, other) for other in above)
    rows = []
    for point in line.points:
        if finite := [value for value in point.values if not math.isnan(value)]:
            rows.append(
                {
                    "model": line.model.name,
                    "x": point.x,
                    "y": statistics.median(finite),
                    "low": min(finite),
                    "high": max(finite),
                    "values": len(finite),
                    "inside": 1,
                    "marked": int(point.marked),
                    "width": 1.7 + min(2.0, 8 / (len(above) + 1)) * beneath,
                }
            )
    return rows


def _coincide(line: Line, other: Line) -> bool:
    near = partial(math.isclose, rel_tol=0.005, abs_tol=0.005)
    own, others = (
        [(p.x, statistics.median(p.values)) for p in one.points] for one in (line, other)
    )
    return len(own) == len(others) and all(
        a == c and near(b, d) for (a, b), (c, d) in zip(own, others, strict=True)
    )


def _lines(
    models: Sequence[ModelStyle], rows: Sequence[Datum], axes: tuple[Axis, Axis]
) -> list[alt.Chart]:
    """Bands and lines."""
    x, y = (axis.encode for axis in axes)
    place = {"x": x(alt.X, "x"), "color": by_model(models)["color"]}
    line = alt.Chart().mark_line(
        opacity=opacity(1), clip=True, strokeWidth=alt.ExprRef(expr="datum.width")
    )
    layers = [line.encode(**place, y=y(alt.Y, "y"))]
    if _spread(rows):
        band = alt.Chart().mark_area(opacity=opacity(0.16), clip=True)
        layers.insert(0, band.encode(**place, y=y(alt.Y, "low"), y2="high:Q"))
    return layers


def _marks(
    models: Sequence[ModelStyle],
    rows: Sequence[Datum],
    axes: tuple[Axis, Axis],
    spread: tuple[str, str],
) -> list[alt.Chart]:
    """Marks, and larger areas around them that react to the pointer."""
    x, y = axes
    found = {"x": x.title, "y": y.title}
    if _spread(rows):
        found |= dict(zip(("low", "high"), spread, strict=True))
    place = {"x": x.encode(alt.X, "x"), "y": y.encode(alt.Y, "y")}
    visible, inside = (alt.Chart().transform_filter(f"datum.{f}") for f in ("marked", "inside"))
    mark = visible.mark_point(filled=True, size=42, opacity=opacity(1))
    area = inside.mark_circle(size=160, opacity=0, color=INK)
    return [mark.encode(**place, **by_model(models)), area.encode(**place, tooltip=numbers(found))]


def _spread(rows: Sequence[Datum]) -> bool:
    return any(row["low"] < row["high"] for row in rows)


def _outside(
    models: Sequence[ModelStyle], rows: Sequence[Datum], axes: tuple[Axis, Axis]
) -> list[alt.Chart]:
    """Triangles at the edge for values off the scale."""
    x, y = axes
    assert y.domain is not None
    layers = []
    for shape, edge in zip(("triangle-down", "triangle-up"), y.domain, strict=True):
        own = [row | {"edge": edge} for row in rows if (row["y"] > edge) == (edge == y.domain[1])]
        mark = own_rows(own).mark_point(filled=True, size=90, shape=shape, opacity=opacity(1))
        place = {"x": x.encode(alt.X, "x"), "y": y.encode(alt.Y, "edge")}
        look = {"color": by_model(models)["color"], "tooltip": numbers({"y": y.title})}
        layers += [mark.encode(**place, **look)] if own else []
    return layers


def _levels(levels: Sequence[Level], axes: tuple[Axis, Axis]) -> list[alt.Chart]:
    """Rules across the chart, and their labels above it or at its right, where no mark is."""
    x, y = axes
    layers = []
    for level in levels:
        if level.x is not None:
            base = own_rows([{"x": level.x, "text": level.text}])
            place = {"x": x.encode(alt.X, "x")}
            label = base.mark_text(baseline="bottom", dy=-3, y=0).encode(**place, text="text:N")
            layers += [base.mark_rule(opacity=0.5).encode(**place), label]
    across = [(level.y, level.text) for level in levels if level.y is not None]
    heights = spread_out([HEIGHT * (1 - y.share(height, HEIGHT)) for height, _ in across])
    for (height, text), at in zip(across, heights, strict=True):
        base = own_rows([{"y": height, "text": text}])
        rule = base.mark_rule(opacity=0.6, strokeDash=[2, 3]).encode(y=y.encode(alt.Y, "y"))
        label = base.mark_text(baseline="middle", align="left", dx=6, limit=LONGEST, y=at)
        layers += [rule, label.encode(x=alt.value("width"), text="text:N")]
    return layers


def length_ticks(lengths: Sequence[float]) -> dict[float, str]:
    """Ticks of a logarithmic axis at the lengths that leave enough space, the largest first.

    Example:
        >>> length_ticks([256, 300, 1024])
        {1024: '1,024', 300: '300'}
    """
    first, *others = sorted(set(lengths), reverse=True)
    gap = (first / min(lengths)) ** (1 / 7)
    ticks = [first]
    for length in others:
        if ticks[-1] / length >= gap:
            ticks.append(length)
    return {tick: f"{tick:,g}" for tick in ticks}
