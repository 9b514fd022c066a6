"""Drawing plots: inline in a page with the colours of its style sheet, or into files for a paper.

In a page, text and axes have the page's text colour and model number i has ``--model-i``, so one
drawing serves the light and the dark page. In a file they have the colours of the light page on
white, and the legend is part of the picture. Neither pyplot nor global settings are used.
"""

import html
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.rcsetup import cycler

from stateline.files import write_atomically
from stateline.reports.format import fold

COLOURS = (
    *("#0067a8", "#d1500a", "#00875f", "#b84d8b"),
    *("#b07a00", "#3299d6", "#4a4f57", "#6c4fb8"),
)
"""Colours of the models on white."""

PLOT_SIZE = (3.6, 2.6)
KEY_SIZE = (0.36, 0.16)
LEGEND_LINE = 0.17
"""Height of a line of the legend in inches; text is 8 points high."""
LEGEND_WIDTH = 42
"""Characters of a model's name on a line of the legend."""

_MARKERS = "os^DvPX*"
_PAGE_INK = "#010203"
_PAGE_COLOURS = tuple(f"#0102f{index}" for index in range(len(COLOURS)))
_PAPER_INK = "#1c2024"
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "stateline",
    "text.parse_math": False,
    "font.size": 8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.5,
}
_INK = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
_NOTHING = dict.fromkeys(["Date", "Creator", "Format", "Type"])


def ink() -> str:
    """The colour of text and axes in the current drawing."""
    return str(matplotlib.rcParams["text.color"])


def colour(index: int) -> str:
    """The colour of a model in the current drawing."""
    return f"C{index % len(COLOURS)}"


def line_style(index: int) -> dict[str, Any]:
    """The style of a model's line; when colours repeat, the markers change."""
    turn, place = divmod(index, len(COLOURS))
    return {
        "color": colour(index),
        "marker": _MARKERS[(place + turn) % len(_MARKERS)],
        "markersize": 4.5,
        "markeredgewidth": 0,
        "linewidth": 1.4,
    }


def key(axes: Axes, index: int) -> None:
    """A short sample of a model's line, for the legends of a page."""
    axes.set_axis_off()
    axes.set_position((0, 0, 1, 1))
    axes.set_xlim(0, 2)
    axes.plot([0, 1, 2], [0, 0, 0], **line_style(index), markevery=[1], clip_on=False)


def svg(
    draw: Callable[[Axes], None], name: str, label: str, size: tuple[float, float] = PLOT_SIZE
) -> str:
    """Draw one plot for a page.

    Args:
        draw: Draws on empty axes.
        name: Unique in the page; the ids in the SVG begin with it.
        label: Description for readers who cannot see the plot.
        size: Width and height in inches.

    Returns:
        A self-contained ``<svg>`` element; the same drawing gives the same text.
    """
    with _settings(_PAGE_INK, _PAGE_COLOURS, {"svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=_NOTHING, transparent=True)
    return _inline(file.getvalue(), name, label)


def save(draw: Callable[[Axes], None], models: Sequence[tuple[int, str]], path: Path) -> None:
    """Draw one plot for a paper, as PNG (300 dots per inch) and SVG.

    Args:
        draw: Draws on empty axes.
        models: Number and name of each model in the plot, for the legend below it.
        path: Path of the files without suffix; existing files are replaced.

    Raises:
        InputError: If they cannot be written.
    """
    names = [fold(name, LEGEND_WIDTH) for _, name in models]
    columns = 2 if all(len(name) <= LEGEND_WIDTH // 3 for name in names) else 1
    lines = sum(name.count("\n") + 1 for name in names[::columns])
    with _settings(_PAPER_INK, COLOURS, {"svg.fonttype": "path"}):
        size = (PLOT_SIZE[0], PLOT_SIZE[1] + LEGEND_LINE * lines)
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        draw(figure.subplots())
        styles = [line_style(index) for index, _ in models]
        handles = [Line2D([], [], **s, label=n) for s, n in zip(styles, names, strict=True)]
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
        for kind, metadata in (("png", {"Software": None}), ("svg", _NOTHING)):
            write = partial(figure.savefig, format=kind, dpi=300, metadata=metadata)
            write_atomically(path.with_name(f"{path.name}.{kind}"), write)


@contextmanager
def _settings(ink: str, colours: Sequence[str], others: dict[Any, Any]) -> Iterator[None]:
    """Settings of matplotlib for one drawing, independent of the user's."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE | others | dict.fromkeys((*_INK, "grid.color"), ink))
        matplotlib.rcParams["axes.prop_cycle"] = cycler(color=colours)
        yield


def _inline(document: str, name: str, label: str) -> str:
    """An SVG document as an element of a page that has several."""
    text = document[document.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"| font-family: [^;"]*;', "", text)
    text = re.sub(r'<g id="[^"]*"', "<g", text).replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", text)
    text = re.sub('^<svg width="[^"]*" height="[^"]*"', "", text)
    for index, placeholder in enumerate(_PAGE_COLOURS):
        text = text.replace(placeholder, f"var(--model-{index})")
    text = text.replace(_PAGE_INK, "currentColor")
    return f'<svg role="img" aria-label="{html.escape(label)}"{text}'
