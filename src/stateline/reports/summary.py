"""The tables of a report: from the results to one row of cells per model."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stateline.reports.cells import (
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
from stateline.reports.costs import DECODING, FLOPS, STATE, TRAINING, cost_lengths
from stateline.reports.records import Record, runs_of, task_label


class Column(NamedTuple):
    """A heading, one cell per model, and the heading that it shares with its neighbours."""

    heading: str
    cells: Sequence[Cell]
    group: str = ""


class Table(NamedTuple):
    """Columns over the models, which stand in the order in which they were given."""

    models: Sequence[str]
    columns: Sequence[Column]

    def rows(self) -> Iterator[tuple[str, tuple[Cell, ...]]]:
        """Each model with its cells."""
        return zip(self.models, zip(*(c.cells for c in self.columns), strict=True), strict=True)


def main_table(results: Record) -> Table:
    """The comparison at a glance: parameters, each task at two lengths, and the costs.

    A task stands with its training length and its longest one, a cost with its longest length
    (the state with its shortest too, so that one sees whether it grows; and as many letters as
    could be copied from it).
    """
    columns = [Column("parameters", parameter_cells(results["models"], results["runs"]))]
    for task in results["tasks"]:
        longest = max(task["eval_lengths"])
        columns += [
            _score_column(results, task, length)
            for length in dict.fromkeys([task["train_length"], longest])
        ]
        if task["solved_at"] is not None:
            columns.append(_steps_column(results, task))
        needed = Column("bits needed", capacity_cells(results, task), task_label(results, task))
        columns += [needed] if any(cell != MISSING for cell in needed.cells) else []
    for cost, ends in ((TRAINING, [-1]), (DECODING, [-1]), (STATE, [0, -1])):
        lengths = cost_lengths(results, cost)
        for length in dict.fromkeys(lengths[end] for end in ends if lengths):
            heading = f"{cost.short} at\N{NO-BREAK SPACE}{length}"
            columns.append(Column(heading, cost_cells(results, cost, length), "Cost"))
    if any("longest_copy" in entry for entry in results["speed"]):
        columns.append(Column("letters in the state", longest_copy_cells(results), "Cost"))
    return Table(results["models"], columns)


def length_table(results: Record, task: Record) -> Table:
    """One task at every length."""
    columns = [_score_column(results, task, length) for length in task["eval_lengths"]]
    return Table(results["models"], [column._replace(group="") for column in columns])


def run_table(results: Record, task: Record) -> Table:
    """How the models trained on one task: their size, steps to solve it, and time."""
    runs = [runs_of(results, model, task) for model in results["models"]]
    task_runs = [run for group in runs for run in group]
    columns = [
        Column("parameters", parameter_cells(results["models"], task_runs)),
        Column("d_model", [median_cell(group, "d_model", "{:.0f}".format) for group in runs]),
        Column("seeds", [Cell(str(len(group)), value=len(group)) for group in runs]),
        Column("steps trained", [median_cell(group, "steps", "{:,.0f}".format) for group in runs]),
        Column("seconds", [median_cell(group, "seconds", "{:.1f}".format) for group in runs]),
        Column(
            "tokens/s",
            [median_cell(group, "tokens_per_second", "{:,.0f}".format) for group in runs],
        ),
    ]
    if task["solved_at"] is not None:
        reached = [
            Column(f"steps to {goal:g}", reached_cells(results, task, goal))
            for goal in (0.5, 0.8)
            if task["higher_is_better"] and goal < task["solved_at"] <= 1
        ]
        columns = [*reached, _steps_column(results, task)._replace(group=""), *columns]
    return Table(results["models"], columns)


def training_table(results: Record, task: Record) -> Table:
    """Every setting that the models trained with on one task; without columns if none is known."""
    runs = [runs_of(results, model, task) for model in results["models"]]
    names = dict.fromkeys(
        name for group in runs for run in group for name in run.get("training", {})
    )
    columns = [Column(name, [setting_cell(group, name) for group in runs]) for name in names]
    return Table(results["models"], columns)


def cost_table(results: Record) -> Table:
    """Every cost at every length that it was measured at."""
    columns = [
        Column(f"at\N{NO-BREAK SPACE}{length}", cost_cells(results, cost, length), cost.title)
        for cost in (STATE, DECODING, TRAINING, FLOPS)
        for length in cost_lengths(results, cost)
    ]
    return Table(results["models"], columns)


def _score_column(results: Record, task: Record, length: int) -> Column:
    trained = " (trained)" if length == task["train_length"] else ""
    heading = f"at\N{NO-BREAK SPACE}{length}{trained}"
    return Column(heading, score_cells(results, task, length), task_label(results, task))


def _steps_column(results: Record, task: Record) -> Column:
    return Column("steps to solve", steps_cells(results, task), task_label(results, task))
