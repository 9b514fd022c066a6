"""A chart: its title and note, its data as rows, and its drawing by Vega-Lite."""

import json
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import altair as alt

from stateline.charts.style import HEIGHT, WIDTH, ModelStyle, config

Datum = dict[str, Any]

SHOWN = "(!length(shown) || indexof(shown, datum.model) >= 0)"
"""An expression: true for marks of the models that the reader has chosen, or if none is chosen."""

PADDING = 6
"""Pixels between the ends of an axis and the nearest data."""

FADED = 0.06
"""Opacity of the models that the reader has not chosen."""


class Axis(NamedTuple):
    """One axis of a chart.

    Attributes:
        title: What it shows, with the unit.
        scale: Linear, or logarithmic to base 2 or 10.
        domain: Least and largest value; by default of the data.
        ticks: Values with the texts of their ticks; by default Vega-Lite's.
        form: Format of numbers, as in d3-format.
    """

    title: str
    scale: Literal["linear", "log2", "log10"] = "linear"
    domain: tuple[float, float] | None = None
    ticks: dict[float, str] | None = None
    form: str = ",.4~r"

    def encode(self, channel: type[alt.X] | type[alt.Y], field: str) -> Any:
        """The encoding of a field of the rows by this axis."""
        scale: dict[str, Any] = {"nice": False, "padding": PADDING}
        logarithmic = {"type": "log", "base": 2 if self.scale == "log2" else 10}
        scale |= {"zero": False} if self.scale == "linear" else logarithmic
        if self.domain is not None:
            scale["domain"] = list(self.domain)
        ticks: dict[str, Any] = {"format": self.form}
        if self.ticks:
            values = list(self.ticks)
            texts = {f"{value:.15g}": text for value, text in self.ticks.items()}
            ticks = {"values": values, "labelExpr": f"({json.dumps(texts)})[datum.value]"}
        return channel(f"{field}:Q", title=self.title, scale=scale, axis=ticks)

    def over(self, values: Sequence[float]) -> "Axis":
        """The axis with a domain: its own, or from the least to the largest value."""
        if self.domain is not None:
            return self
        low, high = min(values), max(values)
        if low == high and self.scale == "linear":
            low, high = low - 0.5, high + 0.5
        elif low == high:
            low, high = low / 2, high * 2
        return self._replace(domain=(low, high))

    def share(self, value: float, pixels: int) -> float:
        """The place of a value on an axis with a domain, as a share of its length in pixels."""
        assert self.domain is not None
        scaled = float if self.scale == "linear" else math.log
        low, own, high = (scaled(number) for number in (self.domain[0], value, self.domain[1]))
        return (PADDING + (own - low) / (high - low) * (pixels - 2 * PADDING)) / pixels


class Chart(NamedTuple):
    """A chart for readers, files and pages.

    Attributes:
        name: Unique in a report; also the name of its files, without suffix.
        title: What is plotted against what.
        notes: How to read it, in sentences; a page says once what several charts have in common.
        models: The models in it.
        rows: Its data, a row per point.
        layers: What is drawn, from bottom to top.
    """

    name: str
    title: str
    notes: tuple[str, ...]
    models: list[ModelStyle]
    rows: list[Datum]
    layers: list[alt.Chart]

    @property
    def note(self) -> str:
        """How to read it."""
        return " ".join(self.notes)

    def altair(self, *, alone: bool = True) -> alt.LayerChart:
        """The chart as an object of Altair, to be shown in a notebook or changed.

        Args:
            alone: Whether to add a title, a legend and a white background; a page has its own.
        """
        drawn = (
            alt.layer(*self.layers, data=alt.InlineData(values=self.rows))
            .add_params(alt.param(name="shown", value=[]))
            .properties(width=WIDTH, height=HEIGHT)
            .configure(**config(legend=alone))
        )
        return drawn.properties(title=self.title, background="white") if alone else drawn

    def spec(self, *, alone: bool = True) -> dict[str, Any]:
        """The chart as a Vega-Lite specification, with its data inside; tests validate it."""
        return self.altair(alone=alone).to_dict(validate=False)


def side_by_side(charts: Sequence[Chart]) -> dict[str, Any]:
    """Charts of the same models in one picture, with one legend, as a Vega-Lite specification."""
    drawn = [
        alt.layer(*chart.layers, data=alt.InlineData(values=chart.rows)).properties(
            width=WIDTH, height=HEIGHT, title=chart.title
        )
        for chart in charts
    ]
    row = alt.hconcat(*drawn, background="white").add_params(alt.param(name="shown", value=[]))
    return row.configure(**config(legend=True)).to_dict(validate=False)


def by_model(models: Sequence[ModelStyle]) -> dict[str, Any]:
    """The encodings of a layer that shows models: a colour and a shape for each."""
    names = [model.name for model in models]
    colours = alt.Scale(domain=names, range=[model.colour for model in models])
    shapes = alt.Scale(domain=names, range=[model.shape for model in models])
    return {
        "color": alt.Color("model:N", scale=colours),
        "shape": alt.Shape("model:N", scale=shapes),
    }


def opacity(value: str | float) -> alt.ExprRef:
    """An opacity that fades where the reader has chosen other models.

    Args:
        value: A number, or an expression over ``datum``.
    """
    return alt.ExprRef(expr=f"({SHOWN} ? 1 : {FADED}) * ({value})")


def numbers(titles: dict[str, str]) -> list[alt.Tooltip]:
    """What the pointer shows: the model, and numbers, given by field with their titles."""
    found = [alt.Tooltip(f"{f}:Q", title=title, format=",.4~r") for f, title in titles.items()]
    return [alt.Tooltip("model:N", title="model"), *found]


def own_rows(rows: Sequence[Datum]) -> alt.Chart:
    """A layer with rows of its own."""
    return alt.Chart(alt.InlineData(values=list(rows)))
