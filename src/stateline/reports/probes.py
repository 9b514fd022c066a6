"""Results of probes as tables in the terminal, and as a page with charts."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stateline.charts.chart import Axis, Chart
from stateline.charts.lines import Line, length_ticks, line_chart
from stateline.charts.lines import Point as Place
from stateline.charts.style import styled
from stateline.files import write_text
from stateline.probe.results import Point, ProbeResults
from stateline.probe.tasks import PROBES
from stateline.reports.format import DASH
from stateline.reports.page import Key, render


def point_line(point: Point, *, measured: bool) -> str:
    """One line of text about a point that was measured now, or found in earlier results."""
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
    """Write a self-contained page.

    Raises:
        InputError: If the folder cannot be written to.
    """
    charts = {task: exact_match_by_length(results, task) for task in tasks(results)}
    sections = [
        {
            "title": PROBES[task].title,
            "unit": PROBES[task].unit,
            "charts": [chart] if chart.rows else [],
            "lengths": results.lengths(task),
            "rows": [(model, _points(results, model, task)) for model in results.models()],
        }
        for task, chart in charts.items()
    ]
    look = {model.name: model for model in styled(results.models())}
    page = render(
        "probes.html",
        [chart for chart in charts.values() if chart.rows],
        results=results,
        title="Stateline: probes",
        caution="",
        sections=sections,
        look=look,
        legend=[Key(name, model, [name]) for name, model in look.items()],
        score=score,
    )
    write_text(path, page)


def tasks(results: ProbeResults) -> list[str]:
    """The probes that have points, in the order of the table of probes."""
    found = {point.task for point in results.points}
    return [task for task in PROBES if task in found]


def exact_match_by_length(results: ProbeResults, task: str) -> Chart:
    """Mean exact match of each model against length, with a band of one standard deviation."""
    lines = []
    for model in styled(results.models()):
        points = _points(results, model.name, task)
        shown = [point for point in points if point is not None and not point.skipped]
        lines.append(Line(model, [Place(p.length, _band(p)) for p in shown]))
    lengths = [point.x for line in lines for point in line.points]
    return line_chart(
        f"probe-{task}",
        "Exact match by length",
        ["Mean over batches, with a band of their standard deviation."],
        lines,
        (
            Axis(PROBES[task].unit, "log2", ticks=length_ticks(lengths) if lengths else None),
            Axis("exact match", domain=(0.0, 1.0)),
        ),
        spread=("mean - standard deviation", "mean + standard deviation"),
    )


def _band(point: Point) -> tuple[float, float, float]:
    return (point.mean - point.spread, point.mean, point.mean + point.spread)


def _points(results: ProbeResults, model: str, task: str) -> list[Point | None]:
    return [results.find(model, task, length) for length in results.lengths(task)]
