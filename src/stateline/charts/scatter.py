"""Charts of scores against costs, with the Pareto front."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import altair as alt

from stateline.charts.chart import Axis, Chart, Row, by_model, numbers, opacity, own_rows
from stateline.charts.style import INK, Model


class Spot(NamedTuple):
    """A model in the plane of cost and score.

    Attributes:
        model: The model.
        costs: Median, low and high end of its cost.
        score: Median of its seeds.
        low: Lowest seed.
        high: Highest seed.
    """

    model: Model
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
        less_cost: True if less of the cost is better, as of bytes; false as of speed.
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
    note: str,
    spots: Sequence[Spot],
    best: Sequence[Spot],
    axes: tuple[Axis, Axis],
    *,
    less_cost: bool,
) -> Chart:
    """A chart of models by cost and score; the front is drawn, and the models on it are named.

    Args:
        name: Unique in a report; also the name of its files.
        title: What is plotted against what.
        note: How to read it.
        spots: Where the models are.
        best: Those on the front, by cost.
        axes: Of the cost and of the score.
        less_cost: True if less of the cost is better.
    """
    x, y = axes
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
    costs, on_front = [spot.cost for spot in spots], [row for row in rows if row["front"]]
    layers += _names(
        sorted(on_front, key=lambda row: row["x"]), place, math.sqrt(min(costs) * max(costs))
    )
    return Chart(name, title, note, models, rows, layers)


def _names(rows: Sequence[Row], place: dict[str, Any], middle: float) -> list[alt.Chart]:
    """The names of models, beside their marks; in turns above and below, so that few overlap."""
    layers = []
    for rank, row in enumerate(rows):
        align: Literal["left", "right"] = "right" if row["x"] > middle else "left"
        dx, dy = (-8 if align == "right" else 8), (13 if rank % 2 else -9)
        text = own_rows([row]).mark_text(align=align, dx=dx, dy=dy, limit=150)
        layers.append(text.encode(**place, text="model:N"))
    return layers


def _row(spot: Spot, on_front: bool) -> Row:
    """The row of a spot."""
    _, *cost_ends = spot.costs
    place = {"x": spot.cost, "y": spot.score, "low": spot.low, "high": spot.high}
    reach = dict(zip(("cost_low", "cost_high"), cost_ends, strict=True))
    return {"model": spot.model.name, **place, **reach, "front": int(on_front)}
