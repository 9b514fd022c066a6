"""A benchmark as a table, as plots and as a file."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from stateline.bench.record import FORMAT, Benchmark, Figure
from stateline.errors import InputError
from stateline.files import write_atomically, write_text

MIB = 2**20


def print_benchmark(found: Benchmark, console: Console, *, judge: bool) -> None:
    """Print a table per case: medians, spread, and the ratio to the first candidate.

    Args:
        found: What was measured.
        console: Where to print.
        judge: Whether to print ratios; false on a busy machine.
    """
    gigabytes, gigaflops = found.bytes_per_second / 1e9, found.flops_per_second / 1e9
    console.print(
        f"{found.device}, {found.threads} thread(s), {found.dtype}, torch "
        f"{found.environment['torch']}: copies {gigabytes:.0f} GB/s, products "
        f"{gigaflops:.0f} GFLOP/s",
        highlight=False,
    )
    for case, work in dict.fromkeys((figure.case, figure.work) for figure in found.figures):
        own = [f for f in found.figures if (f.case, f.work) == (case, work)]
        console.print(_table(case, work, own, judge))
    for skipped in found.skipped:
        console.print(
            f"left out: {skipped.case} {skipped.work} at {skipped.length} by {skipped.candidate}: "
            f"{skipped.reason}",
            highlight=False,
            markup=False,
        )
    if found.busy:
        console.print(
            f"other programs used {found.foreign_cores:.1f} cores meanwhile: these times are not "
            "to be trusted" + ("" if judge else ", so no ratios are shown (--force shows them)")
        )


def _table(case: str, work: str, figures: Sequence[Figure], judge: bool) -> Table:
    table = Table(title=f"{case}, {work}", title_justify="left", box=None, header_style="bold")
    for heading in ("batch x length", "by", "median", "quartiles", "ns/position"):
        table.add_column(heading, justify="left" if heading == "by" else "right")
    for heading in ("speed-up", "first call", "memory", "of peak", "error"):
        table.add_column(heading, justify="right")
    for (batch, length), group in groupby(figures, key=lambda f: (f.batch, f.length)):
        rows = list(group)
        for figure in rows:
            ratio = rows[0].seconds / figure.seconds
            table.add_row(
                f"{batch} x {length:,}",
                figure.candidate,
                _time(figure.seconds),
                f"{_time(figure.low)} to {_time(figure.high)}",
                f"{figure.nanoseconds:.3g}",
                f"{ratio:.2f}" if judge and figure is not rows[0] else "",
                _time(figure.first),
                "" if figure.n_bytes is None else f"{figure.n_bytes / MIB:.1f} MiB",
                "" if figure.floor_share is None else f"{figure.floor_share:.0%}",
                "" if figure.error is None else f"{figure.error:.1e}",
            )
    return table


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def write_benchmark(found: Benchmark, folder: Path) -> list[Path]:
    """Write ``SUITE.json`` and one plot per case into a folder.

    Args:
        found: What was measured.
        folder: Where; earlier results of the suite are replaced.

    Returns:
        The files.
    """
    target = folder / f"{found.suite}.json"
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    write_text(target, text + "\n")
    plots = []
    for case in dict.fromkeys(figure.case for figure in found.figures):
        figures = [figure for figure in found.figures if figure.case == case]
        if len({figure.length for figure in figures}) > 1:
            plots.append(_plot(case, figures, folder / f"{found.suite}-{case}.svg"))
    return [target, *plots]


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


def _plot(case: str, figures: Sequence[Figure], path: Path) -> Path:
    """Nanoseconds per position by length, a line for each candidate and work."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(6, 4), layout="constrained")
    axes = canvas.add_subplot(xscale="log", yscale="log", xlabel="length", ylabel="ns per position")
    mixed = len({(f.batch, f.length) for f in figures}) > len({f.length for f in figures})
    lines = dict.fromkeys((f.candidate, f.work, f.batch if mixed else 0) for f in figures)
    for candidate, work, batch in lines:
        own = [f for f in figures if (f.candidate, f.work) == (candidate, work)]
        own = [f for f in own if batch in (0, f.batch)]
        axes.plot(
            [f.length for f in own],
            [f.nanoseconds for f in own],
            label=f"{candidate}, {work}" + (f", batch {batch}" if batch else ""),
            marker="o",
            linestyle="-" if work == "forward" else "--",
        )
    axes.set_title(case)
    axes.legend()
    write_atomically(path, lambda temporary: canvas.savefig(temporary, format="svg"))
    return path
