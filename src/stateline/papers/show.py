"""A recorded table for readers."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Grid

from stateline.papers.record import RecordedRow, TableRecord

NONE = "-"
"""Stands for a figure that there is none of."""


def cell(row: RecordedRow, column: int) -> str:
    """Mean and standard deviation of a figure: ``98.4 ± 0.3``; or how many seeds have one."""
    if (spread := row.spread(column)) is not None:
        mean = number(spread.mean)
        return mean if len(row.seeds) == 1 else f"{mean} ± {spread.deviation:.2g}"
    found = [value for value in row.values[column] if value is not None]
    if not found:
        return NONE
    return f"{number(min(found))} to {number(max(found))}, {len(found)} of {len(row.seeds)} seeds"


def number(value: float) -> str:
    """A figure to four digits; an integer in full.

    Example:
        >>> number(98.4123), number(1200), number(0.00021)
        ('98.41', '1,200', '0.00021')
    """
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1000 else f"{value:.4g}"


def print_table(record: TableRecord, console: Console) -> None:
    """Print a table, the paper's figures in brackets."""
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False)
    grid.add_column("")
    for heading in (*record.columns, "parameters", "updates", "seconds"):
        grid.add_column(heading, justify="right")
    for row in record.rows:
        figures = []
        for column, paper in enumerate(row.paper):
            figures.append(cell(row, column) + ("" if paper is None else f" ({number(paper)})"))
        counts = (row.parameters, row.updates, row.seconds)
        grid.add_row(row.name, *figures, *(NONE if n is None else f"{n:,.0f}" for n in counts))
    console.print(grid)
    console.print(f"{seeds(record.rows)}: mean and standard deviation; in brackets, the paper.")


def seeds(rows: Sequence[RecordedRow]) -> str:
    """How many seeds some rows have, in words: ``3 seeds``."""
    counts = sorted({len(row.seeds) for row in rows})
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) + (
        " seed" if counts == [1] else " seeds"
    )
