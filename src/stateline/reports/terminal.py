"""A comparison as one table in the terminal."""

import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from stateline.reports.answers import Answers, answers
from stateline.reports.budgets import Budget
from stateline.reports.conclusions import PairRow, conclusions, pair_rows
from stateline.reports.costs import disturbance
from stateline.reports.decision import (
    CHOSEN,
    HEADINGS,
    decisions,
    elsewhere,
    fastest_solvers,
    question,
    solvers,
)
from stateline.reports.format import DASH, fold, words
from stateline.reports.outlook import outlook
from stateline.reports.records import task_label
from stateline.reports.sentences import baselines, caution, headline, spent, unfinished
from stateline.reports.summary import Column, Table, main_table
from stateline.reports.table_cells import NOT_SOLVED, Cell
from stateline.runs.protocol_records import TOLERANCE
from stateline.runs.results import Results, TaskRecord

NARROWEST = 10
"""Least width of a model's column; longer cells are wrapped at a space or a dash."""


MOST_PAIRS = 15
"""Largest number of pairs that are printed; the page has all."""


def print_results(results: Results, console: Console, budgets: Sequence[Budget] = ()) -> None:
    """Print the decisions, the main table, how to read it, and what it shows.

    The main table has a column per model, so that six models on any number of tasks fit into 100
    characters. Models that do not fit are printed in further tables.

    Args:
        results: Results of one comparison, or of several, merged.
        console: Where to print.
        budgets: Limits on the costs of models; the decision is among models within the limits.
    """
    found = answers(results, budgets)
    table = main_table(found)
    console.print(Text(headline(results), style="bold"))
    warnings = (unfinished(results), caution(results), disturbance(results))
    for warning in filter(None, warnings):
        console.print(Text(warning, style="yellow"))
    _print_decisions(found, console)
    label_width = max(len(label) for column in table.columns for label in _labels(column))
    for piece in _pieces(table, (console.width - label_width) // (NARROWEST + 1)):
        console.print(_draw(piece, (console.width - label_width) // len(piece.models) - 1))
    if legend := _legend(table):
        console.print(Text(legend, style="dim"))
    about = {task_label(results, task): _about(task) for task in results.tasks}
    said = {label: list[str]() for label in about} | dict(conclusions(found))
    for label, sentences in said.items():
        console.print(Text.assemble((f"\n{label}", "bold"), about.get(label, "")))
        for sentence in sentences:
            console.print(Text(f"- {sentence}"))
    _print_pairs(found, console)


def _print_pairs(found: Answers, console: Console) -> None:
    """Print every pair of the decided lengths, unless there are too many to read."""
    for answer in found.decided():
        if not 0 < len(answer.verdict.pairs) <= MOST_PAIRS:
            continue
        drawn = RichTable(box=None, padding=(0, 2, 0, 2), pad_edge=False, show_edge=False)
        for heading in PairRow._fields:
            drawn.add_column(heading, overflow="fold", style="" if heading == "pair" else "dim")
        for row in pair_rows(answer):
            drawn.add_row(*map(Text, row))
        console.print(Text(f"\nPairs: {answer.label} at {answer.length:,}", style="bold"))
        console.print(drawn)


def _print_decisions(found: Answers, console: Console) -> None:
    """Print who solved each task, and which model to take: a row per length, its answer first."""
    results = found.results
    solved = {own.label: solvers(own) for own in found.every if not own.beyond}
    drawn = RichTable(box=None, show_header=False, padding=(0, 1, 0, 2), pad_edge=False)
    drawn.add_column()
    drawn.add_column(overflow="fold")
    above = ""
    for decision in decisions(found):
        if decision.task != above:
            drawn.add_row(Text(decision.task, style="bold"), Text(solved.get(decision.task, "")))
        above = decision.task
        answer = Text(decision.best or DASH, style="bold")
        told = f": {decision.score}, {decision.costs}" if decision.best else ""
        answer.append(f"{told}\n{decision.sure}", style="not bold")
        answer.append(f": {decision.alike}" if decision.alike else "", style="not bold dim")
        after = f"\n{HEADINGS[-1]}: {decision.following}" if decision.following else ""
        drawn.add_row(f"at {decision.length}", answer.append(after, style="not bold"))
    if drawn.row_count:
        console.print(Text(f"\n{question(found)}", style="bold"))
        console.print(drawn)
    for sentence in [*fastest_solvers(found), *elsewhere(found)]:
        console.print(Text(f"- {sentence}"))
    for task in results.tasks:
        for sentence in outlook(results, task):
            console.print(Text(f"- {task_label(results, task)}: {sentence}"))
    if drawn.row_count and len(results.models) > 1:
        console.print(Text(CHOSEN, style="dim"))
    if said := spent(results):
        console.print(Text(said, style="dim"))
    console.print()


def _about(task: TaskRecord) -> str:
    """The text after a task's name: its metric, its description, and its baselines."""
    return f": {words(task.metric)}. {task.about} {baselines(task)}".rstrip()


def _labels(column: Column) -> tuple[str, str]:
    """The heading of the group, and the heading of the column."""
    return column.group, f"  {column.heading}" if column.group else column.heading


def _pieces(table: Table, size: int) -> Iterator[Table]:
    """The fewest tables with at most ``size`` models each (at least one), evenly filled."""
    count = math.ceil(len(table.models) / max(size, 1))
    size = math.ceil(len(table.models) / count)
    for start in range(0, len(table.models), size):
        part = slice(start, start + size)
        columns = [column._replace(cells=column.cells[part]) for column in table.columns]
        yield Table(table.models[part], columns)


def _draw(table: Table, model_width: int) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    drawn.add_column("", no_wrap=True)
    for model in table.models:
        heading = Text(fold(model, model_width))
        drawn.add_column(heading, justify="right", overflow="fold", max_width=model_width)
    above = ""
    for column in table.columns:
        group, label = _labels(column)
        if group != above:
            drawn.add_row(Text(f"\n{group}", style="bold"))
        above = group
        drawn.add_row(label, *(_cell(cell, model_width) for cell in column.cells))
    return drawn


def _cell(cell: Cell, width: int) -> Text:
    mark = "*" if cell.best else "!" if cell.off else ""
    drawn = Text(fold(mark + cell.text, width), style="bold" if cell.best else "")
    return drawn.append(f"\n{fold(cell.note, width)}" if cell.note else "", style="not bold dim")


def _legend(table: Table) -> str:
    """Explanations of the marks and words that occur in a table."""
    cells = [cell for column in table.columns for cell in column.cells]
    off = f"! more than {TOLERANCE:.0%} off the intended number of parameters."
    unsolved = "not solved: missed the training length, so not scored at other lengths."
    seeds = "Below scores: lowest and highest seed; below speeds: their spread."
    said = {
        "* best of its row or not told apart from the best, if others are clearly worse.": any(
            cell.best for cell in cells
        ),
        off: any(cell.off for cell in cells),
        unsolved: any(cell.text == NOT_SOLVED.text for cell in cells),
        seeds: any(cell.note for cell in cells),
    }
    return " ".join(text for text, applies in said.items() if applies)
