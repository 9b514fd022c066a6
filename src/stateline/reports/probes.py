"""Results of probes as tables in the terminal, and as a page with plots."""

from functools import partial
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stateline.files import write_text
from stateline.probe.results import Point, ProbeResults
from stateline.probe.tasks import PROBES
from stateline.reports import drawing
from stateline.reports.format import DASH
from stateline.reports.html import PLOTS, printable


def point_line(point: Point, *, measured: bool) -> str:
    """One line on a point, as it is measured or found."""
    place = f"{point.model}  {point.task} {point.length}"
    if point.skipped:
        return f"{place}: skipped: {point.skipped}"
    how = f"{point.seconds:.1f} s" if measured else "measured before"
    return f"{place}: exact match {score(point)}, F1 {point.mean_f1:.3f}  ({how})"


def score(point: Point | None) -> str:
    """Mean and spread of exact match."""
    if point is None or point.skipped:
        return DASH
    return f"{point.mean:.3f} ± {point.spread:.3f}"


def print_probes(results: ProbeResults, console: Console) -> None:
    """Print a table per probe: a row per model, a column per length."""
    for task in tasks(results):
        probe, lengths = PROBES[task], results.lengths(task)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column(f"exact match at ... {probe.unit}")
        for length in lengths:
            table.add_column(str(length), justify="right")
        for model in results.models():
            points = [results.find(model, task, length) for length in lengths]
            if any(points):
                table.add_row(Text(model), *map(score, points))
        console.print(Text(f"\n{probe.title}", style="bold"))
        console.print(table)
    console.print(Text("Mean over batches ± their standard deviation.", style="dim"))


def write_probes(results: ProbeResults, path: Path) -> None:
    """Write a self-contained page, and its plots as files into the folder next to it.

    Raises:
        InputError: If the folder cannot be written to.
    """
    models = results.models()
    environment = Environment(
        loader=PackageLoader("stateline.reports"), autoescape=True, undefined=StrictUndefined
    )
    sections = []
    for task in tasks(results):
        draw = partial(exact_match_by_length, results=results, task=task)
        shown = [(models.index(model), model) for model in results.models(task)]
        label = f"{PROBES[task].title}: exact match by length, one line per model"
        sections.append(
            {
                "title": PROBES[task].title,
                "unit": PROBES[task].unit,
                "models": shown,
                "plot": Markup(drawing.svg(draw, task, label)) if shown else "",
                "lengths": results.lengths(task),
                "rows": [(m, _points(results, m, task)) for m in models],
            }
        )
        if shown:
            drawing.save(draw, shown, path.parent / PLOTS / f"probe-{task}")
    keys = [
        Markup(drawing.svg(partial(drawing.key, index=i), f"key-{i}", model, drawing.KEY_SIZE))
        for i, model in enumerate(models)
    ]
    page = environment.get_template("probes.html").render(
        results=results, sections=sections, keys=keys, colours=drawing.COLOURS, score=score
    )
    write_text(path, printable(page))


def tasks(results: ProbeResults) -> list[str]:
    """The probes that have points, in the order of the table of probes."""
    found = {point.task for point in results.points}
    return [task for task in PROBES if task in found]


def exact_match_by_length(axes: Axes, results: ProbeResults, task: str) -> None:
    """Mean exact match of each model against length, with a band of one standard deviation."""
    for model in results.models(task):
        index = results.models().index(model)
        points = [p for p in _points(results, model, task) if p is not None and not p.skipped]
        lengths = [point.length for point in points]
        low, high = ([p.mean + sign * p.spread for p in points] for sign in (-1, 1))
        axes.fill_between(lengths, low, high, color=drawing.colour(index), alpha=0.15, linewidth=0)
        axes.plot(lengths, [point.mean for point in points], **drawing.line_style(index))
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel(PROBES[task].unit)
    axes.set_ylabel("exact match")


def _points(results: ProbeResults, model: str, task: str) -> list[Point | None]:
    return [results.find(model, task, length) for length in results.lengths(task)]
