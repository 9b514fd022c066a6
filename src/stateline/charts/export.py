"""Charts as files and as parts of a page."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from operator import methodcaller
from pathlib import Path
from typing import Any

import vl_convert

from stateline.charts.chart import Chart
from stateline.files import write_atomically

SCALE = 300 / 72
"""Pixels of a PNG for each of the chart: 300 dots per inch in print."""

_COLUMNS = ("model", "x", "y", "low", "high", "values")


def picture(spec: dict[str, Any]) -> str:
    """A Vega-Lite specification as an SVG document; the same one gives the same text."""
    text = vl_convert.vegalite_to_svg(spec)
    ids = list(dict.fromkeys(re.findall(r'id="(clip\d+)"', text)))  # counted over all pictures
    return re.sub(r'(id="|#)(clip\d+)', lambda m: f"{m[1]}clip-{ids.index(m[2])}", text)


def svg(chart: Chart) -> str:
    """A chart as an SVG document."""
    return picture(chart.spec())


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
    return vl_convert.vegalite_to_png(chart.spec(), scale=SCALE, ppi=72)


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


def write_charts(charts: Iterable[Chart], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write each chart into a folder, in each of the formats.

    Args:
        charts: The charts to write; the files have their names.
        folder: Where; files of the same names are replaced.
        formats: Keys of :data:`FORMATS`.

    Returns:
        The files.

    Raises:
        InputError: If a file cannot be written.
    """
    written = []
    for chart in charts:
        for form in formats:
            content = FORMATS[form](chart)
            path = folder / f"{chart.name}.{form}"
            data = content if isinstance(content, bytes) else content.encode()
            write_atomically(path, methodcaller("write_bytes", data))
            written.append(path)
    return written


@cache
def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, which sets ``window.vegaEmbed``."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
