"""Which heads retrieve, as tables in the terminal, and as a page with heat maps."""

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
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("without")
        for heading in ("exact match falls by", "nats rise by"):
            table.add_column(heading, justify="right")
        for loss in found.ranking()[:SHOWN]:
            table.add_row(name_of(loss), match(loss), nats(loss))
        console.print(table)
    console.print(Text("Mean over examples ± standard error; layer.head.", style="dim"))


def title(found: Ablation) -> str:
    """The model and the task."""
    return f"{found.model} without one of its {found.unit}, {found.task} {found.length}"


def match(loss: Loss) -> str:
    """Fall of exact match."""
    return f"{loss.match:.3f} ± {loss.match_error:.3f}"


def nats(loss: Loss) -> str:
    """Rise of the loss of an answer."""
    return f"{loss.nats:.3f} ± {loss.nats_error:.3f}"


def head_map(found: Ablation, number: int) -> Chart:
    """Layers and heads, coloured by the rise of the loss."""
    cells = [(loss.head, loss.layer, max(0.0, loss.nats)) for loss in found.losses]
    notes = ["How many nats an answer loses without the head; a gain is shown as 0."]
    return heat_map(f"heads-{number}", title(found), notes, cells, ("head", "layer", "nats"))


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
        name_of=name_of,
        heading=title,
        match=match,
        nats=nats,
    )
    write_text(path, page)
