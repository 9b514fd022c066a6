"""How charts look: a colour and a shape for each model, and the same axes everywhere.

The colours are for a light page. A page replaces them by CSS variables (:data:`VARIABLES`): each
colour appears unchanged in a chart's SVG, so one rule of the style sheet for each colour is enough
for the light and the dark scheme.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

COLOURS = (
    *("#0067a8", "#d1500a", "#00875f", "#b84d8b"),
    *("#b07a00", "#3299d6", "#4a4f57", "#6c4fb8"),
)
"""Colours of models on white; they differ in lightness too, for readers who do not see red."""

DARK_COLOURS = (
    *("#4a9ce0", "#f57b42", "#22b98e", "#e38fc0"),
    *("#efb62d", "#93d4ff", "#c3c8cf", "#a68be6"),
)
"""The same on a dark page."""

SHAPES = (
    *("circle", "square", "triangle-up", "diamond", "triangle-down", "cross"),
    *("triangle-right", "triangle-left"),
)
"""Shapes of the points; models that share a colour differ in shape."""

GLYPHS = dict(zip(SHAPES, "●■▲◆▼✚▶◀", strict=True))
"""The shapes as characters, for legends in text."""

INK = "#1c2024"
"""Colour of text and axes."""

VARIABLES = {colour: f"--model-{index}" for index, colour in enumerate(COLOURS)} | {INK: "--text"}
"""The CSS variable that a page shows in the place of each colour of its charts."""

WIDTH, HEIGHT = 300, 210
"""Size of the area of a chart inside its axes, in pixels."""


class ModelStyle(NamedTuple):
    """A model in charts: its name, and how it is drawn in all of them."""

    name: str
    colour: str
    shape: str

    @property
    def glyph(self) -> str:
        """Its shape as a character."""
        return GLYPHS[self.shape]

    @property
    def variable(self) -> str:
        """The CSS variable of its colour in a page."""
        return VARIABLES[self.colour]


def styled(names: Sequence[str], families: Sequence[str] | None = None) -> list[ModelStyle]:
    """Give each model a colour and a shape.

    Args:
        names: Names of the models, in the order of the legend.
        families: For each model, the group that shares its colour, such as its other sizes; by
            default each model has a colour of its own.

    Returns:
        The models. No two look the same as long as there are at most 64.
    """
    groups = list(names if families is None else families)
    order = list(dict.fromkeys(groups))
    models: list[ModelStyle] = []
    for name, group in zip(names, groups, strict=True):
        place = order.index(group) % len(COLOURS)
        own = [SHAPES.index(m.shape) for m in models if m.colour == COLOURS[place]]
        first = own[-1] + 1 if own else place
        models.append(ModelStyle(name, COLOURS[place], SHAPES[first % len(SHAPES)]))
    return models


def config(*, legend: bool) -> dict[str, Any]:
    """The configuration of every chart."""
    text = {"labelColor": INK, "titleColor": INK, "labelFontSize": 11, "titleFontSize": 11}
    line = {"domainColor": INK, "tickColor": INK, "gridColor": INK, "gridOpacity": 0.1}
    axis = {"titleFontWeight": "normal", "tickSize": 4, "titlePadding": 6, "labelLimit": 90}
    return {
        "aria": False,
        "mark": {"aria": False},
        "font": "sans-serif",
        "background": "transparent",
        "view": {"stroke": None, "continuousWidth": WIDTH, "continuousHeight": HEIGHT},
        "axis": text | line | axis,
        "axisX": {"grid": False, "labelOverlap": "greedy", "labelFlush": False, "tickCount": 5},
        "axisY": {"domain": False, "ticks": False, "tickCount": 5},
        "legend": {"labelColor": INK, "labelLimit": 420, "title": None, "orient": "bottom"}
        | {"columns": 1, "symbolOpacity": 1, "symbolSize": 60, "disable": not legend},
        "title": {"color": INK, "fontSize": 13, "anchor": "start", "offset": 10},
        "text": {"color": INK, "fontSize": 11},
        "rule": {"color": INK},
    }
