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
    return (
        f"{place}: exact match {point.exact_match:.3f} ({between(point)}), F1 {point.f1:.3f}, "
        f"{point.examples} examples  ({how})"
    )


def between(point: Point) -> str:
    """The 95% interval of exact match."""
    low, high = point.interval
    return f"{low:.3f} to {high:.3f}"


def print_probes(results: ProbeResults, console: Console) -> None:
    """Print a table per probe: a row per model and length."""
    for task in tasks(results):
        probe = PROBES[task]
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("model", overflow="fold")
        for heading in ("length", "exact match", "95% interval", "F1", "examples"):
            table.add_column(heading, justify="right", no_wrap=True)
        for model in results.models():
            for point in filter(None, _points(results, model, task)):
                values = [DASH] * 4
                if not point.skipped:
                    values = [f"{point.exact_match:.3f}", between(point), f"{point.f1:.3f}"]
                    values.append(str(point.examples))
                table.add_row(Text(model), str(point.length), *values)
        console.print(Text(f"\n{probe.title}, by {probe.unit}", style="bold"))
        console.print(table)


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
        between=between,
    )
    write_text(path, page)


def tasks(results: ProbeResults) -> list[str]:
    """The probes that have points, in the order of the table of probes."""
    found = {point.task for point in results.points}
    return [task for task in PROBES if task in found]


def exact_match_by_length(results: ProbeResults, task: str) -> Chart:
    """Exact match of each model against length, with a band of its 95% interval."""
    lines = []
    for model in styled(results.models()):
        points = _points(results, model.name, task)
        shown = [point for point in points if point is not None and not point.skipped]
        lines.append(Line(model, [Place(p.length, _band(p)) for p in shown]))
    lengths = [point.x for line in lines for point in line.points]
    return line_chart(
        f"probe-{task}",
        "Exact match by length",
        ["The share of exact answers, with a band of its 95% interval (Wilson)."],
        lines,
        (
            Axis(PROBES[task].unit, "log2", ticks=length_ticks(lengths) if lengths else None),
            Axis("exact match", domain=(0.0, 1.0)),
        ),
        spread=("95% from", "95% to"),
    )


def _band(point: Point) -> tuple[float, float, float]:
    low, high = point.interval
    return (low, point.exact_match, high)


def _points(results: ProbeResults, model: str, task: str) -> list[Point | None]:
    return [results.find(model, task, length) for length in results.lengths(task)]
