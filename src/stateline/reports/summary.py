"""The tables of a report: from the results to one row of cells per model."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from stateline.reports.answers import Answers
from stateline.reports.costs import STATE, common_lengths, cost_lengths, costs, speed
from stateline.reports.format import words
from stateline.reports.records import runs_of, task_label
from stateline.reports.table_cells import (
    MISSING,
    Cell,
    capacity_cells,
    cost_cells,
    longest_copy_cells,
    median_cell,
    parameter_cells,
    reached_cells,
    score_cells,
    setting_cell,
    steps_cells,
)
from stateline.runs.judged import score
from stateline.runs.results import Results, TaskRecord


class Column(NamedTuple):
    """A heading, one cell per model, and a heading shared with neighbouring columns."""

    heading: str
    cells: Sequence[Cell]
    group: str = ""


class Table(NamedTuple):
    """Columns with one cell per model, in the order in which the models were given."""

    models: Sequence[str]
    columns: Sequence[Column]

    def rows(self) -> Iterator[tuple[str, tuple[Cell, ...]]]:
        """Each model with its cells."""
        return zip(self.models, zip(*(c.cells for c in self.columns), strict=True), strict=True)

    def groups(self) -> list[tuple[str, list[tuple[int, Column, str]]]]:
        """Neighbouring columns of one group; each with its number and its class in a page."""
        numbered = zip(range(1, len(self.columns) + 1), self.columns, self.starts(), strict=True)
        return [(name, list(own)) for name, own in groupby(numbered, lambda item: item[1].group)]

    def split(self, most: int) -> list["Table"]:
        """Tables of at most ``most`` columns. A group is not divided, so a wide one has more."""
        parts: list[list[Column]] = [[]]
        for _, group in self.groups():
            columns = [column for _, column, _ in group]
            if parts[-1] and len(parts[-1]) + len(columns) > most:
                parts.append([])
            parts[-1] += columns
        return [Table(self.models, columns) for columns in parts]

    def starts(self) -> list[str]:
        """The class of each column in a page: ``start`` where a group begins."""
        before = ["", *(column.group for column in self.columns)]
        return [
            "start" if column.group != group else ""
            for column, group in zip(self.columns, before, strict=False)
        ]


def main_table(found: Answers) -> Table:
    """The comparison at a glance: parameters, each task at two lengths, and the costs.

    Tasks are shown at their training length and at their longest length; costs at the longest
    length. The state is shown at its shortest length too, to tell whether it grows, and with the
    number of letters that could be copied from it.
    """
    results = found.results
    columns = [Column("parameters", parameter_cells(results.models, results.runs))]
    for task in results.tasks:
        longest = max(task.eval_lengths)
        columns += [
            _score_column(found, task, length)
            for length in dict.fromkeys([task.train_length, longest])
        ]
        if task.solved_at is not None:
            columns.append(_steps_column(results, task))
        needed = Column("bits needed", capacity_cells(results, task), task_label(results, task))
        columns += _filled(needed)
    for cost, ends in ((speed("train"), [-1]), (speed("decode"), [-1]), (STATE, [0, -1])):
        lengths = common_lengths(results, cost)
        for length in dict.fromkeys(lengths[end] for end in ends if lengths):
            heading = f"{cost.short} at\N{NO-BREAK SPACE}{length}"
            columns.append(Column(heading, cost_cells(results, cost, length), "Cost"))
    columns += _filled(Column("letters in the state", longest_copy_cells(results), "Bound"))
    return Table(results.models, columns)


def length_table(found: Answers, task: TaskRecord) -> Table:
    """One task at every length."""
    columns = [_score_column(found, task, length) for length in task.eval_lengths]
    return Table(found.results.models, [column._replace(group="") for column in columns])


def run_table(results: Results, task: TaskRecord) -> Table:
    """Training on one task: size, steps to solve it, and time."""
    runs = [runs_of(results, model, task) for model in results.models]
    task_runs = [run for group in runs for run in group]
    columns = [
        Column("parameters", parameter_cells(results.models, task_runs)),
        Column("d_model", [median_cell(group, "d_model", "{:.0f}".format) for group in runs]),
        Column("seeds", [Cell(str(len(group)), value=len(group)) for group in runs]),
        Column("steps trained", [median_cell(group, "steps", "{:,.0f}".format) for group in runs]),
        Column("seconds", [median_cell(group, "seconds", "{:.1f}".format) for group in runs]),
        Column(
            "tokens/s",
            [median_cell(group, "tokens_per_second", "{:,.0f}".format) for group in runs],
        ),
    ]
    if task.solved_at is not None:
        reached = [
            Column(f"steps to {goal:g}", reached_cells(results, task, goal))
            for goal in (0.5, 0.8)
            if task.higher_is_better and goal < task.solved_at <= 1
        ]
        columns = [*reached, _steps_column(results, task)._replace(group=""), *columns]
    return Table(results.models, columns)


def training_table(results: Results, task: TaskRecord) -> Table:
    """The training settings in which runs on one task differ; no columns if there are none."""
    runs = [runs_of(results, model, task) for model in results.models]
    names = dict.fromkeys(name for group in runs for run in group for name in run.training)
    columns = [Column(name, [setting_cell(group, name) for group in runs]) for name in names]
    differing = [c for c in columns if len({cell.text for cell in c.cells if cell != MISSING}) > 1]
    return Table(results.models, [c for c in differing if c.heading != "seed"])


def shared_settings(results: Results, task: TaskRecord) -> dict[str, str]:
    """The training settings that all runs on one task have in common."""
    runs = [run for run in results.runs if run.task == task.spec]
    names = dict.fromkeys(name for run in runs for name in run.training)
    cells = {name: setting_cell(runs, name) for name in names if name != "seed"}
    differing = {column.heading for column in training_table(results, task).columns}
    return {name: cell.text for name, cell in cells.items() if name not in differing}


def cost_table(results: Results) -> Table:
    """Every cost at every measured length."""
    columns = [
        Column(f"at\N{NO-BREAK SPACE}{length}", cost_cells(results, cost, length), cost.title)
        for cost in costs(results)
        for length in cost_lengths(results, cost)
    ]
    return Table(results.models, columns)


def all_runs_table(results: Results) -> Table:
    """Every run, a row each."""
    runs, tasks = results.runs, {task.spec: task for task in results.tasks}
    own = [tasks[run.task] for run in runs]
    scores = [score(run, task, task.train_length) for run, task in zip(runs, own, strict=True)]
    columns = [
        Column("task", [Cell(task_label(results, task)) for task in own]),
        Column("seed", [Cell(str(run.seed), value=run.seed) for run in runs]),
        Column("parameters", [_number(run.parameters, ",") for run in runs]),
        Column("d_model", [_number(run.d_model, ",") for run in runs]),
        Column("learning rate", [_number(run.training.get("lr"), "g") for run in runs]),
        Column("steps", [_number(run.steps, ",") for run in runs]),
        Column("ended", [Cell(run.stopped) for run in runs]),
        Column("seconds", [_number(run.seconds, ".1f") for run in runs]),
        Column("seconds to compile", [_number(run.compile_seconds, ".1f") for run in runs]),
        Column("score", [_number(value, ".4f") for value in scores]),
        Column("of", [Cell(f"{words(task.metric)} at {task.train_length}") for task in own]),
    ]
    return Table([run.model for run in runs], columns)


def trials_table(results: Results) -> Table:
    """Every setting that was tried, a row each; no columns without trials."""
    trials, tasks = results.trials, {task.spec: task for task in results.tasks}
    if not trials:
        return Table([], [])
    muon = [_number(t.muon_lr, "g") for t in trials]
    columns = [
        Column("task", [Cell(task_label(results, tasks[t.task])) for t in trials]),
        Column("learning rate", [_number(t.lr, "g") for t in trials]),
        *([Column("Muon's learning rate", muon)] if any(t.muon_lr for t in trials) else []),
        Column("weight decay", [_number(t.weight_decay, "g") for t in trials]),
        Column("seed", [_number(t.seed, "") for t in trials]),
        Column("steps", [_number(t.steps, ",") for t in trials]),
        Column("of", [_number(t.steps_planned, ",") for t in trials]),
        Column("validation", [_number(t.validation, ".4f") for t in trials]),
        Column("ended", [Cell(t.stopped) for t in trials]),
        Column("seconds", [_number(t.seconds, ".1f") for t in trials]),
        Column("chosen", [Cell("chosen" if t.chosen else "", best=t.chosen) for t in trials]),
    ]
    return Table([t.model for t in trials], columns)


def _number(value: object, form: str) -> Cell:
    """A cell with a number; a dash where there is none."""
    if not isinstance(value, int | float) or math.isnan(value):
        return MISSING
    return Cell(format(value, form), value=value)


def _filled(column: Column) -> list[Column]:
    """The column, unless all of its cells are empty."""
    return [column] if any(cell != MISSING for cell in column.cells) else []


def _score_column(found: Answers, task: TaskRecord, length: int) -> Column:
    trained = " (trained)" if length == task.train_length else ""
    heading = f"at\N{NO-BREAK SPACE}{length}{trained}"
    return Column(heading, score_cells(found, task, length), task_label(found.results, task))


def _steps_column(results: Results, task: TaskRecord) -> Column:
    return Column("steps to solve", steps_cells(results, task), task_label(results, task))
