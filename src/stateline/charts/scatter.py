"""Charts of scores against costs, with the Pareto front."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import altair as alt

from stateline.charts.chart import Axis, Chart, Datum, by_model, numbers, opacity, own_rows
from stateline.charts.labels import LONGEST, Box, mark_box, place_names
from stateline.charts.style import HEIGHT, INK, WIDTH, ModelStyle


class Spot(NamedTuple):
    """A model in the plane of cost and score.

    Attributes:
        model: The model.
        costs: Median, low and high end of its cost.
        score: Median of its seeds.
        low: Lowest seed.
        high: Highest seed.
    """

    model: ModelStyle
    costs: tuple[float, float, float]
    score: float
    low: float
    high: float

    @property
    def cost(self) -> float:
        """Median of the cost."""
        return self.costs[0]


def front(spots: Sequence[Spot], *, less_cost: bool, more_score: bool) -> list[Spot]:
    """The spots that no other spot dominates, by cost.

    A spot dominates another if it is at least as good in cost and in score, and better in one.

    Args:
        spots: Where the models are.
        less_cost: True if less of the cost is better, as for bytes; false for speed.
        more_score: True if a higher score is better.
    """

    def key(spot: Spot) -> tuple[float, float]:
        """Both as costs: less is better."""
        return (spot.cost if less_cost else -spot.cost, -spot.score if more_score else spot.score)

    found = [
        spot
        for spot in spots
        if not any(
            key(o)[0] <= key(spot)[0] and key(o)[1] <= key(spot)[1] and key(o) != key(spot)
            for o in spots
        )
    ]
    return sorted(found, key=lambda spot: spot.cost)


def trade_off_chart(
    name: str,
    title: str,
    notes: Sequence[str],
    spots: Sequence[Spot],
    best: Sequence[Spot],
    axes: tuple[Axis, Axis],
    *,
    less_cost: bool,
) -> Chart:
    """A chart of models by cost and score; the front is drawn, and the models on it are named.

    Names cover neither each other nor marks; a name for which there is no room is left out.

    Args:
        name: Unique in a report; also the name of its files.
        title: What is plotted against what.
        notes: How to read it, in sentences.
        spots: Where the models are.
        best: The models on the front, by cost.
        axes: Of the cost and of the score.
        less_cost: True if less of the cost is better.
    """
    x = axes[0].over([end for spot in spots for end in spot.costs])
    y = axes[1].over([end for spot in spots for end in (spot.low, spot.high)])
    place = {"x": x.encode(alt.X, "x"), "y": y.encode(alt.Y, "y")}
    models = [spot.model for spot in spots]
    look, rows = by_model(models), [_row(spot, spot in best) for spot in spots]
    step: Literal["step-after", "step-before"] = "step-after" if less_cost else "step-before"
    found = {"x": x.title, "y": y.title}
    layers = [
        own_rows([row for row in rows if row["front"]])
        .mark_line(interpolate=step, color=INK, opacity=0.45, strokeDash=[4, 3])
        .encode(**place)
    ]
    bar = alt.Chart().mark_rule(opacity=opacity(0.6), strokeWidth=1.5)
    if any(row["low"] < row["high"] for row in rows):
        found |= {"low": "lowest", "high": "highest"}
        reach = place | {"y": y.encode(alt.Y, "low"), "y2": "high:Q"}
        layers.append(bar.encode(**reach, color=look["color"]))
    if any(row["cost_low"] < row["cost_high"] for row in rows):
        found |= {"cost_low": "cost from", "cost_high": "cost to"}
        reach = place | {"x": x.encode(alt.X, "cost_low"), "x2": "cost_high:Q"}
        layers.append(bar.encode(**reach, color=look["color"]))
    mark = alt.Chart().mark_point(filled=True, size=90, opacity=opacity(1))
    layers.append(mark.encode(**place, **look, tooltip=numbers(found)))
    layers += _names(rows, (x, y), place, less_cost=less_cost)
    return Chart(name, title, tuple(notes), models, rows, layers)


def _names(
    rows: Sequence[Datum], axes: tuple[Axis, Axis], place: dict[str, Any], *, less_cost: bool
) -> list[alt.Chart]:
    """The names of the models on the front, beside their marks."""
    x, y = axes

    def pixels(cost: float, score: float) -> tuple[float, float]:
        return WIDTH * x.share(cost, WIDTH), HEIGHT * (1 - y.share(score, HEIGHT))

    marks = [mark_box(*pixels(row["x"], row["y"])) for row in rows]
    bars = [(*pixels(r["x"], r["high"]), *pixels(r["x"], r["low"])) for r in rows]
    bars += [(*pixels(r["cost_low"], r["y"]), *pixels(r["cost_high"], r["y"])) for r in rows]
    on_front = sorted((row for row in rows if row["front"]), key=lambda row: row["x"])
    for first, second in pairwise(on_front):
        left, right = pixels(first["x"], first["y"]), pixels(second["x"], second["y"])
        level, turn = (left[1], right[0]) if less_cost else (right[1], left[0])
        bars.append((left[0], level, right[0], level))
        bars.append((turn, min(left[1], right[1]), turn, max(left[1], right[1])))
    lines = [Box(a - 1, min(b, d) - 1, c + 1, max(b, d) + 1) for a, b, c, d in bars]
    names = [(row["model"], *pixels(row["x"], row["y"])) for row in on_front]
    layers = []
    for row, found in zip(on_front, place_names(names, marks, lines, (WIDTH, HEIGHT)), strict=True):
        if found is not None:
            text = own_rows([row]).mark_text(
                align=found.align, baseline="middle", dx=found.dx, dy=found.dy, limit=LONGEST
            )
            layers.append(text.encode(**place, text="model:N"))
    return layers


def _row(spot: Spot, on_front: bool) -> Datum:
    """The row of a spot."""
    _, *cost_ends = spot.costs
    place = {"x": spot.cost, "y": spot.score, "low": spot.low, "high": spot.high}
    reach = dict(zip(("cost_low", "cost_high"), cost_ends, strict=True))
    return {"model": spot.model.name, **place, **reach, "front": int(on_front)}
