"""A benchmark as a table, as plots and as a file."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from stateline.bench.record import FORMAT, Benchmark, Figure
from stateline.charts.chart import Axis, Chart
from stateline.charts.export import write_charts
from stateline.charts.lines import Line, Point, length_ticks, line_chart
from stateline.charts.style import styled
from stateline.errors import InputError
from stateline.files import write_text


def print_benchmark(found: Benchmark, console: Console, *, judge: bool) -> None:
    """Print a table per case: medians, spread, and the ratio to the first candidate.

    ``judge`` says whether to print ratios; ratios of a busy machine mean nothing.
    """
    gigabytes, gigaflops = found.bytes_per_second / 1e9, found.flops_per_second / 1e9
    console.print(
        f"{found.device}, {found.threads} thread(s), {found.dtype}, torch "
        f"{found.environment['torch']}: copies {gigabytes:.0f} GB/s, products "
        f"{gigaflops:.0f} GFLOP/s; each: the time per {' and '.join(_units(found))}",
        highlight=False,
    )
    for case, work in dict.fromkeys((figure.case, figure.work) for figure in found.figures):
        own = [f for f in found.figures if (f.case, f.work) == (case, work)]
        console.print(f"{case}, {work}", style="italic", highlight=False, soft_wrap=True)
        console.print(_table(own, judge))
    for skipped in found.skipped:
        console.print(
            f"left out: {skipped.case} {skipped.work} at {skipped.length} by {skipped.candidate}: "
            f"{skipped.reason}",
            highlight=False,
        )
    if found.busy:
        console.print(
            f"other programs used {found.foreign_cores:.1f} cores meanwhile: these times are not "
            "to be trusted" + ("" if judge else ", so no ratios are shown (--force shows them)")
        )


def _table(figures: Sequence[Figure], judge: bool) -> Table:
    """A row for each figure, without the columns that none of them has."""
    columns: dict[str, list[str]] = {}
    for (batch, length), group in groupby(figures, key=lambda f: (f.batch, f.length)):
        rows = list(group)
        for figure in rows:
            ratio = rows[0].seconds / figure.seconds
            cells = {
                "batch x length": f"{batch} x {length:,}",
                "by": figure.candidate,
                "median": _time(figure.seconds),
                "quartiles": _quartiles(figure),
                "each": _time(figure.nanoseconds * 1e-9),
                "faster": f"{ratio:.2f}" if judge and figure is not rows[0] else "",
                "first call": _time(figure.first),
                "MiB": "" if figure.n_bytes is None else f"{figure.n_bytes / 2**20:,.1f}",
                "of peak": "" if figure.floor_share is None else f"{figure.floor_share:.0%}",
                "error": "" if figure.error is None else f"{figure.error:.0e}",
            }
            for heading, cell in cells.items():
                columns.setdefault(heading, []).append(cell)
    columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading, column in columns.items():
        if heading == "by":
            table.add_column(heading, overflow="fold")
        else:
            width = max(len(text) for text in (*column, *heading.split()))
            table.add_column(heading, justify="right", width=width)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _units(found: Benchmark) -> list[str]:
    """What the time is divided by: for ops and layers, the positions times channels."""
    return ["position", "channel"] if found.suite in ("ops", "layers") else ["position"]


def _quartiles(figure: Figure) -> str:
    """Both in the unit of the median."""
    _, size = _unit(figure.seconds)
    return f"{figure.low / size:.3g} to {figure.high / size:.3g}"


def _time(seconds: float) -> str:
    unit, size = _unit(seconds)
    return f"{seconds / size:.3g} {unit}"


def _unit(seconds: float) -> tuple[str, float]:
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    return next((pair for pair in units if seconds >= pair[1]), ("ns", 1e-9))


def write_benchmark(found: Benchmark, folder: Path) -> list[Path]:
    """Write ``SUITE.json`` and a plot per case into a folder, over earlier results of the suite."""
    target = folder / f"{found.suite}.json"
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    write_text(target, text + "\n")
    charts = []
    for case in dict.fromkeys(figure.case for figure in found.figures):
        figures = [figure for figure in found.figures if figure.case == case]
        if len({figure.length for figure in figures}) > 1:
            charts.append(_chart(case, figures, _units(found), f"{found.suite}-{case}"))
    return [target, *write_charts(charts, folder, ["svg"])]


def read_benchmark(path: Path) -> Benchmark:
    """Read a file of :func:`write_benchmark`.

    Raises:
        InputError: If it cannot be read or is not one.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Benchmark)
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{path} is not a file of benchmark results: {error}") from error
    if found.format != FORMAT:
        raise InputError(f"{path} must have the format {FORMAT}, got {found.format}")
    return found


def _chart(case: str, figures: Sequence[Figure], units: Sequence[str], name: str) -> Chart:
    """Nanoseconds by length, a line for each candidate, work and batch."""
    mixed = len({(f.batch, f.length) for f in figures}) > len({f.length for f in figures})
    places: dict[str, list[Point]] = {}
    for figure in figures:
        batch = f", batch {figure.batch}" if mixed else ""
        scale = figure.nanoseconds / figure.seconds
        point = Point(figure.length, [scale * s for s in (figure.low, figure.seconds, figure.high)])
        places.setdefault(f"{figure.candidate}, {figure.work}{batch}", []).append(point)
    families = [label.split(",")[0] for label in places]
    return line_chart(
        name,
        case,
        ["Median, with a band from quartile to quartile."],
        [Line(m, places[m.name]) for m in styled(list(places), families)],
        (
            Axis("length", "log2", ticks=length_ticks([figure.length for figure in figures])),
            Axis(f"ns per {' and '.join(units)}", "log10"),
        ),
        spread=("first quartile", "third quartile"),
    )
