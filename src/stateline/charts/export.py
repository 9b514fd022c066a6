"""Charts as files and as parts of a page."""

import base64
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any

from stateline.charts.chart import Chart
from stateline.charts.draw import Call, CannotDrawError, draw
from stateline.errors import InputError
from stateline.files import write_atomically

SCALE = 300 / 72
"""Pixels of a PNG for each of the chart: 300 dots per inch in print."""

_COLUMNS = ("model", "x", "y", "low", "high", "values")


def pictures(specs: Iterable[dict[str, Any]]) -> list[str]:
    """Vega-Lite specifications as SVG documents; the same one gives the same text.

    Raises:
        CannotDrawError: If nothing can be drawn here.
    """
    return [_numbered(text) for text in draw(("vegalite_to_svg", {"vl_spec": s}) for s in specs)]


def _numbered(text: str) -> str:
    """An SVG document whose ids are counted in it alone, not over all pictures."""
    ids = list(dict.fromkeys(re.findall(r'id="(clip\d+)"', text)))
    return re.sub(r'(id="|#)(clip\d+)', lambda m: f"{m[1]}clip-{ids.index(m[2])}", text)


def svg(chart: Chart) -> str:
    """A chart as an SVG document."""
    return pictures([chart.spec()])[0]


def table(chart: Chart) -> str:
    """The data of a chart as CSV, with the titles of its axes as headings."""
    text = io.StringIO()
    columns = [name for name in _COLUMNS if any(name in row for row in chart.rows)]
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(chart.rows)
    return text.getvalue()


def png(chart: Chart) -> bytes:
    """A chart as a PNG of 300 dots per inch."""
    return base64.b64decode(draw([_png_call(chart)])[0])


def _png_call(chart: Chart) -> Call:
    return "vegalite_to_png", {"vl_spec": chart.spec(), "scale": SCALE, "ppi": 72}


def _svg_call(chart: Chart) -> Call:
    return "vegalite_to_svg", {"vl_spec": chart.spec()}


def specification(chart: Chart) -> str:
    """A chart as a Vega-Lite specification in JSON, with its data inside."""
    return json.dumps(chart.spec(), indent=1) + "\n"


FORMATS: dict[str, Callable[[Chart], str | bytes]] = {
    "png": png,
    "svg": svg,
    "csv": table,
    "json": specification,
}
"""How a chart is written, by the suffix of the file."""


_CALLS = {"png": _png_call, "svg": _svg_call}


def write_charts(charts: Iterable[Chart], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write each chart into a folder, in each of the formats.

    Args:
        charts: The charts to write; the files have their names.
        folder: Where; files of the same names are replaced.
        formats: Keys of :data:`FORMATS`.

    Returns:
        The files.

    Raises:
        InputError: If a file cannot be written, or images cannot be drawn.
    """
    charts, written = list(charts), []
    calls = [_CALLS[form] for form in formats if form in _CALLS]
    try:
        draw(call(chart) for chart in charts for call in calls)  # all in one process
    except CannotDrawError as error:
        raise InputError(f"{error}; the formats csv and json need nothing") from error
    for chart in charts:
        for form in formats:
            content = FORMATS[form](chart)
            path = folder / f"{chart.name}.{form}"
            data = content if isinstance(content, bytes) else content.encode()
            write_atomically(path, methodcaller("write_bytes", data))
            written.append(path)
    return written


def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, which sets ``window.vegaEmbed``.

    Raises:
        CannotDrawError: If it cannot be made here.
    """
    return draw([("javascript_bundle", {"snippet": "window.vegaEmbed = vegaEmbed;"})])[0]
