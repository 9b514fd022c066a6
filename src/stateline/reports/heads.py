"""Which heads retrieve, as tables in the terminal, and as a page with heat maps."""

import math
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stateline.charts.chart import Chart
from stateline.charts.heat import heat_map
from stateline.files import write_text
from stateline.probe.ablations import Ablation, Ablations, Loss
from stateline.reports.page import render

SHOWN = 10
"""Heads in the table of the terminal."""


def name_of(loss: Loss) -> str:
    """``layer.head``, as a list of kept heads names it, or the layer alone."""
    return f"{loss.layer}.{loss.head}" if loss.head >= 0 else str(loss.layer)


def print_heads(results: Ablations, console: Console) -> None:
    """Print the heads that each task needs most."""
    for found in results.found:
        whole = f"exact match {found.match:.3f}, {found.nats:.3f} nats, {found.examples} examples"
        console.print(Text(f"\n{title(found)}: {whole}", style="bold"))
        first, *others = headings(found)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column(first)
        for heading in others:
            table.add_column(heading, justify="right")
        for row in cells(found)[:SHOWN]:
            table.add_row(*row)
        console.print(table)
    console.print(Text("Mean over examples ± standard error; layer.head.", style="dim"))


def headings(found: Ablation) -> list[str]:
    """The columns of the table."""
    if found.unit != "windows":
        return ["without", "exact match falls by", "nats rise by"]
    return [
        "head",
        "needs to see",
        *(f"nats rise, {window}" for window in windows(found)),
    ]


def cells(found: Ablation) -> list[list[str]]:
    """The rows of the table; what the answers need most comes first."""
    if found.unit != "windows":
        return [[name_of(loss), match(loss), nats(loss)] for loss in found.ranking()]
    most = max(windows(found), default=0)
    return [
        [name_of(losses[0]), f"more than {most}" if window is None else str(window)]
        + [nats(loss) for loss in losses]
        for window, losses in found.needs()
    ]


def windows(found: Ablation) -> list[int]:
    """The windows that were tried."""
    return sorted({loss.window for loss in found.losses})


def title(found: Ablation) -> str:
    """The model and the task."""
    if found.unit == "windows":
        return f"{found.model} with one head that sees few tokens, {found.task} {found.length}"
    return f"{found.model} without one of its {found.unit}, {found.task} {found.length}"


def match(loss: Loss) -> str:
    """Fall of exact match."""
    return f"{loss.match:.3f} ± {loss.match_error:.3f}"


def nats(loss: Loss) -> str:
    """Rise of the loss of an answer."""
    return f"{loss.nats:.3f} ± {loss.nats_error:.3f}"


def head_map(found: Ablation, number: int) -> Chart:
    """Layers and heads, coloured by the rise of the loss."""
    places = [(loss.head, loss.layer, max(0.0, loss.nats)) for loss in found.losses]
    notes = ["How many nats an answer loses without the head; a gain is shown as 0."]
    shown = "nats"
    if found.unit == "windows":
        tried = windows(found)
        places = [
            (losses[0].head, losses[0].layer, float(sum(w < (window or math.inf) for w in tried)))
            for window, losses in found.needs()
        ]
        notes = [
            f"How many of the windows {', '.join(map(str, tried))} are too small for the head."
        ]
        shown = "windows"
    return heat_map(f"heads-{number}", title(found), notes, places, ("head", "layer", shown))


def write_heads(results: Ablations, path: Path) -> None:
    """Write a self-contained page.

    Raises:
        InputError: If the folder cannot be written to.
    """
    charts = [head_map(found, number) for number, found in enumerate(results.found)]
    page = render(
        "heads.html",
        charts,
        results=results,
        title="Stateline: heads",
        caution="",
        sections=list(zip(results.found, charts, strict=True)),
        heading=title,
        headings=headings,
        cells=cells,
    )
    write_text(path, page)
