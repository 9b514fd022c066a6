"""Charts as files and as parts of a page."""

import base64
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from stateline.charts.chart import Chart, side_by_side
from stateline.charts.draw import CannotDrawError, RendererCall, draw
from stateline.errors import InputError
from stateline.files import write_atomically

SCALE = 300 / 72
"""Pixels of a PNG for each pixel of the chart: 300 dots per inch in print."""

_COLUMNS = ("model", "x", "y", "low", "high", "values")


def pictures(specs: Iterable[dict[str, Any]]) -> list[str]:
    """Vega-Lite specifications as SVG documents; equal specifications give equal texts.

    Raises:
        CannotDrawError: If nothing can be drawn here.
    """
    return [_numbered(text) for text in draw(("vegalite_to_svg", {"vl_spec": s}) for s in specs)]


def _numbered(text: str) -> str:
    """Renumber the ids of an SVG document, so that they do not depend on other pictures."""
    ids = list(dict.fromkeys(re.findall(r'id="(clip\d+)"', text)))
    return re.sub(r'(id="|#)(clip\d+)', lambda m: f"{m[1]}clip-{ids.index(m[2])}", text)


def table(chart: Chart) -> str:
    """The data of a chart as CSV: models, places, ends of the spread, and numbers of values."""
    text = io.StringIO()
    columns = [name for name in _COLUMNS if any(name in row for row in chart.rows)]
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(chart.rows)
    return text.getvalue()


def specification(chart: Chart) -> str:
    """A chart as a Vega-Lite specification in JSON, with its data inside."""
    return json.dumps(chart.spec(), indent=1) + "\n"


def image(chart: Chart, form: str) -> bytes:
    """A chart as a PNG of 300 dots per inch, or as an SVG document.

    Raises:
        CannotDrawError: If nothing can be drawn here.
    """
    return _image(chart.spec(), form)


def _image(spec: dict[str, Any], form: str) -> bytes:
    (drawn,) = draw([_call(spec, form)])
    return base64.b64decode(drawn) if form == "png" else _numbered(drawn).encode()


def _call(spec: dict[str, Any], form: str) -> RendererCall:
    more = {"scale": SCALE, "ppi": 72} if form == "png" else {}
    return f"vegalite_to_{form}", {"vl_spec": spec, **more}


FORMATS: dict[str, Callable[[Chart], bytes]] = {
    "png": partial(image, form="png"),
    "svg": partial(image, form="svg"),
    "csv": lambda chart: table(chart).encode(),
    "json": lambda chart: specification(chart).encode(),
}
"""How a chart is written, by the suffix of the file."""


def write_charts(
    charts: Iterable[Chart],
    folder: Path,
    formats: Sequence[str],
    slides: Mapping[str, Sequence[Chart]] | None = None,
) -> list[Path]:
    """Write each chart into a folder, in each of the formats, and return the files.

    Args:
        charts: The charts to write; the files have their names.
        folder: Where; files of the same names are replaced.
        formats: Keys of :data:`FORMATS`.
        slides: Pictures of several charts side by side, by name; they are written as images only.

    Raises:
        InputError: If a file cannot be written, or images cannot be drawn.
    """
    charts, images = list(charts), [form for form in formats if form in ("png", "svg")]
    wide = {name: side_by_side(pair) for name, pair in (slides or {}).items()}
    specs = [*(chart.spec() for chart in charts), *wide.values()]
    try:
        draw(_call(spec, form) for spec in specs for form in images)  # all in one process
    except CannotDrawError as error:
        raise InputError(f"{error}; the formats csv and json need nothing") from error
    files = {f"{c.name}.{form}": partial(FORMATS[form], c) for c in charts for form in formats}
    for name, spec in wide.items():
        files |= {f"{name}.{form}": partial(_image, spec, form) for form in images}
    for name, content in files.items():
        write_atomically(folder / name, methodcaller("write_bytes", content()))
    return [folder / name for name in files]


def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, which sets ``window.vegaEmbed``.

    Raises:
        CannotDrawError: If it cannot be made here.
    """
    return draw([("javascript_bundle", {"snippet": "window.vegaEmbed = vegaEmbed;"})])[0]
