"""A recorded table for readers."""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Grid

from stateline.papers.record import RecordedRow, TableRecord

NONE = "-"
"""Stands for a missing value."""


def figure(record: TableRecord, row: RecordedRow, column: int) -> str:
    """A value of a record in words.

    Where some seeds solve the task and others do not, the values of the two are shown separately;
    the column that decides also shows the share of the seeds that solve it.
    """
    if not record.solved:
        return cell(row, column)
    heading = record.columns[column]
    decides = heading if heading in record.solved else next(iter(record.solved))
    scores = row.values[record.columns.index(decides)]
    solved = [record.solves(decides, score) for score in scores]
    found = share(sum(solved), len(solved), record.unit)
    if record.unit == "examples":
        return found
    words = kinds(row.values[column], solved)
    return f"{found}: {words}" if heading == decides else words


def kinds(values: Sequence[float | None], solved: Sequence[bool]) -> str:
    """The values of the seeds that have solved a task, and of the others.

    Example:
        >>> kinds([99.9, 95.5, 99.2], [True, False, True])
        '99.2 to 99.9; others 95.5'
    """
    found = {
        kind: [v for v, s in zip(values, solved, strict=True) if s == kind and v is not None]
        for kind in (True, False)
    }
    shown = [_ends(found[True])] if found[True] else []
    shown += [("others " if shown else "") + _ends(found[False])] if found[False] else []
    return "; ".join(shown) or NONE


def cell(row: RecordedRow, column: int) -> str:
    """Mean and standard deviation of a value: ``98.40 ± 0.32``; or how many seeds have one."""
    if (spread := row.spread(column)) is not None:
        return number(spread.mean) if len(row.seeds) == 1 else with_deviation(*spread)
    found = [value for value in row.values[column] if value is not None]
    if not found:
        return NONE
    return f"{_ends(found)}, {len(found)} of {len(row.seeds)} seeds"


def _ends(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys((number(min(values)), number(max(values)))))


def with_deviation(mean: float, deviation: float) -> str:
    """A mean to the decimals in which its deviation has two digits.

    Example:
        >>> with_deviation(98.967, 0.665), with_deviation(966.7, 378.6), with_deviation(0.5, 0)
        ('98.97 ± 0.67', '967 ± 379', '0.5 ± 0')
    """
    if deviation == 0:
        return f"{number(mean)} ± 0"
    decimals = max(0, 1 - math.floor(math.log10(deviation)))
    return f"{mean:,.{decimals}f} ± {deviation:,.{decimals}f}"


def number(value: float) -> str:
    """A number to four digits; an integer of at least 1,000 in full.

    Example:
        >>> number(98.4123), number(1200), number(0.00021)
        ('98.41', '1,200', '0.00021')
    """
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1000 else f"{value:.4g}"


def share(solved: int, count: int, unit: str = "seeds") -> str:
    """How many seeds have solved a task, with the 95 % interval of the share of all seeds.

    The interval is Clopper and Pearson's: for a share outside it, so large a count, or so small a
    one, has a chance below 2.5 %.

    Example:
        >>> share(5, 9), share(3, 3)
        ('5 of 9 seeds (21 to 86 %)', '3 of 3 seeds (29 to 100 %)')
    """

    def at_most(k: int, p: float) -> float:
        return sum(math.comb(count, i) * p**i * (1 - p) ** (count - i) for i in range(k + 1))

    grid = [i / 1000 for i in range(1001)]
    inside = [p for p in grid if at_most(solved, p) > 0.025 and 1 - at_most(solved - 1, p) > 0.025]
    return f"{solved} of {count} {unit} ({100 * inside[0]:.0f} to {100 * inside[-1]:.0f} %)"


def print_table(record: TableRecord, console: Console) -> None:
    """Print a table, with the paper's values in brackets."""
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False)
    grid.add_column("")
    for heading in (*record.columns, "parameters", "updates", "seconds"):
        grid.add_column(heading, justify="right")
    for row in record.rows:
        figures = []
        for column, paper in enumerate(row.paper):
            ours = figure(record, row, column)
            figures.append(ours + ("" if paper is None else f" ({number(paper)})"))
        counts = (row.parameters, row.updates, row.seconds)
        grid.add_row(row.name, *figures, *(NONE if n is None else f"{n:,.0f}" for n in counts))
    console.print(grid)
    shown = "mean and standard deviation"
    if record.solved:
        shown = "how many solve the task, with the interval of 95 % for the share, and their scores"
    console.print(f"{seeds(record.rows)}: {shown}; in brackets, the paper.")


def seeds(rows: Sequence[RecordedRow], unit: str = "seeds") -> str:
    """How many seeds, or examples, some rows have, in words: ``3 seeds``."""
    counts = sorted({len(row.seeds) for row in rows})
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) + (
        f" {unit[:-1]}" if counts == [1] else f" {unit}"
    )
