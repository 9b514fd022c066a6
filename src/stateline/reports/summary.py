"""The tables of a comparison: from its results to one row of cells per model.

A model that misses ``solved_at`` at the length it trained on has learned nothing that could
generalise, so it is not scored at any other length: its cells say so.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stateline.reports.format import DASH, short_bytes, short_number

Record = Mapping[str, Any]
"""The results that ``stateline compare`` writes, or one task, run or speed entry of them."""

PARAMETER_TOLERANCE = 0.05
"""Share of the wanted parameters that a model may be off before the table marks it."""


class Cell(NamedTuple):
    """One number of a table.

    Attributes:
        text: The number as shown, or the reason why there is none.
        note: What belongs beside it in small print: the spread, how many seeds.
        value: What it is compared by; ``None`` where there is nothing to compare.
        best: Whether it is the best of its column.
        off: Whether it is a parameter count too far from the wanted one.
    """

    text: str
    note: str = ""
    value: float | None = None
    best: bool = False
    off: bool = False


MISSING = Cell(DASH)
NOT_SOLVED = Cell("not solved")


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


class Cost(NamedTuple):
    """A field of the ``speed`` entries, a number per length, and how it is worded."""

    field: str
    title: str
    short: str
    unit: str
    length: str
    note: str
    text: Callable[[int | float], str] = short_number
    higher_is_better: bool = False


TRAINING = Cost(
    "train_tokens_per_second",
    title="Training speed",
    short="train tok/s",
    unit="tokens per second",
    length="sequence length (tokens)",
    note="One step is forward, backward and update.",
    higher_is_better=True,
)
DECODING = Cost(
    "decode_tokens_per_second",
    title="Decoding speed",
    short="decode tok/s",
    unit="tokens per second",
    length="tokens already in the state",
    note="One new token at a time, after a context of the given length.",
    higher_is_better=True,
)
STATE = Cost(
    "state_bytes",
    title="State size",
    short="state",
    unit="bytes per sequence",
    length="tokens already in the state",
    note="What one sequence carries along; flat where it does not grow with the context.",
    text=short_bytes,
)
FLOPS = Cost(
    "flops_per_token",
    title="FLOPs per token",
    short="FLOPs",
    unit="FLOPs per token",
    length="sequence length (tokens)",
    note="Counted for one token of a sequence of the given length.",
)


def main_table(results: Record) -> Table:
    """The comparison at a glance: parameters, each task at two lengths, and the costs.

    A task stands with its training length and its longest one, a cost with its longest length
    (the state with its shortest too, so that one sees whether it grows).
    """
    columns = [Column("parameters", _parameter_cells(results["models"], results["runs"]))]
    for task in results["tasks"]:
        longest = max(task["eval_lengths"])
        columns += [
            _score_column(results, task, length)
            for length in dict.fromkeys([task["train_length"], longest])
        ]
        if task["solved_at"] is not None:
            columns.append(_steps_column(results, task))
    for cost, ends in ((TRAINING, [-1]), (DECODING, [-1]), (STATE, [0, -1])):
        lengths = cost_lengths(results, cost)
        for length in dict.fromkeys(lengths[end] for end in ends if lengths):
            heading = f"{cost.short} at\N{NO-BREAK SPACE}{length}"
            columns.append(Column(heading, _cost_cells(results, cost, length), "Cost"))
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
        Column("parameters", _parameter_cells(results["models"], task_runs)),
        Column("d_model", [_median_cell(group, "d_model", "{:.0f}") for group in runs]),
        Column("seeds", [Cell(str(len(group))) for group in runs]),
        Column("steps trained", [_median_cell(group, "steps", "{:,.0f}") for group in runs]),
        Column("seconds", [_median_cell(group, "seconds", "{:.1f}") for group in runs]),
        Column("tokens/s", [_median_cell(group, "tokens_per_second", "{:,.0f}") for group in runs]),
    ]
    if task["solved_at"] is not None:
        columns.insert(0, _steps_column(results, task)._replace(group=""))
    return Table(results["models"], columns)


def cost_table(results: Record) -> Table:
    """Every cost at every length that it was measured at."""
    columns = [
        Column(f"at\N{NO-BREAK SPACE}{length}", _cost_cells(results, cost, length), cost.title)
        for cost in (STATE, DECODING, TRAINING, FLOPS)
        for length in cost_lengths(results, cost)
    ]
    return Table(results["models"], columns)


def task_label(results: Record, task: Record) -> str:
    """The task's title, or its whole spec where two tasks share the title."""
    titles = [other["title"] for other in results["tasks"]]
    return str(task["title"] if titles.count(task["title"]) == 1 else task["spec"])


def runs_of(results: Record, model: str, task: Record) -> list[Record]:
    """The runs of one model on one task, one per seed."""
    return [r for r in results["runs"] if r["model"] == model and r["task"] == task["spec"]]


def score(run: Record, task: Record, length: int) -> float:
    """The task's metric of one run at one length; not a number where training diverged."""
    value = run["by_length"][str(length)][task["metric"]]
    return math.nan if value is None else float(value)


def solved_runs(runs: Sequence[Record], task: Record) -> list[Record]:
    """The runs that may be scored beyond the training length.

    These are the ones that reached ``solved_at`` at it (every run where nothing is ever solved),
    and none at all if the majority of the seeds did not.
    """
    if task["solved_at"] is None:
        return list(runs)
    solved = [run for run in runs if _reached_goal(run, task)]
    return solved if 2 * len(solved) >= len(runs) else []


def _reached_goal(run: Record, task: Record) -> bool:
    value, goal = score(run, task, task["train_length"]), task["solved_at"]
    return bool(value >= goal if task["higher_is_better"] else value <= goal)


def cost_lengths(results: Record, cost: Cost) -> list[int]:
    """The lengths at which a cost was measured for any model, in order."""
    return sorted({int(length) for entry in results["speed"] for length in entry[cost.field]})


def score_cells(results: Record, task: Record, length: int) -> list[Cell]:
    """How well each model does a task at one length, as far as it is scored there."""
    cells = []
    for model in results["models"]:
        runs = runs_of(results, model, task)
        scored = runs if length == task["train_length"] else solved_runs(runs, task)
        values = [score(run, task, length) for run in scored]
        cells.append(_score_cell(values, len(runs)))
    return _mark(cells, task["higher_is_better"])


def _score_column(results: Record, task: Record, length: int) -> Column:
    trained = " (trained)" if length == task["train_length"] else ""
    heading = f"at\N{NO-BREAK SPACE}{length}{trained}"
    return Column(heading, score_cells(results, task, length), task_label(results, task))


def _score_cell(values: Sequence[float], seeds: int) -> Cell:
    """Median and spread of the seeds that are scored, and how many of all they are."""
    if not values:
        return NOT_SOLVED if seeds else MISSING
    value = statistics.median(values)
    spread = f"{min(values):.3f}{DASH}{max(values):.3f}" if min(values) < max(values) else ""
    partial = f"{len(values)}/{seeds} solved" if len(values) < seeds else ""
    note = ", ".join(filter(None, [spread, partial]))
    return Cell(f"{value:.3f}", note, value if math.isfinite(value) else None)


def _steps_column(results: Record, task: Record) -> Column:
    cells = []
    for model in results["models"]:
        steps = [run["steps_to_solve"] for run in runs_of(results, model, task)]
        cells.append(_steps_cell(steps))
    return Column("steps to solve", _mark(cells, False), task_label(results, task))


def _steps_cell(steps: Sequence[int | None]) -> Cell:
    """Median with "never" as the largest number of all: it wins where the majority never solved."""
    if not steps:
        return MISSING
    solved = [s for s in steps if s is not None]
    note = f"{len(solved)}/{len(steps)} solved" if 0 < len(solved) < len(steps) else ""
    value = statistics.median_low([math.inf if s is None else s for s in steps])
    return Cell(f"{value:,.0f}", note, value) if math.isfinite(value) else Cell("never", note)


def _parameter_cells(models: Sequence[str], runs: Sequence[Record]) -> list[Cell]:
    """Parameters of each model: a range where they depend on the vocabulary of the task."""
    cells = []
    for model in models:
        own = [run for run in runs if run["model"] == model]
        counts = sorted({run["parameters"] for run in own})
        ends = dict.fromkeys(short_number(n) for n in (*counts[:1], *counts[-1:]))
        off = any(
            abs(run["parameters"] - run["parameters_wanted"])
            > PARAMETER_TOLERANCE * run["parameters_wanted"]
            for run in own
        )
        cells.append(Cell(DASH.join(ends) or MISSING.text, off=off))
    return cells


def _median_cell(runs: Sequence[Record], field: str, form: str) -> Cell:
    return Cell(form.format(statistics.median(run[field] for run in runs))) if runs else MISSING


def _cost_cells(results: Record, cost: Cost, length: int) -> list[Cell]:
    measured = {
        entry["model"]: entry[cost.field][str(length)]
        for entry in results["speed"]
        if str(length) in entry[cost.field]
    }
    values = [measured.get(model) for model in results["models"]]
    cells = [MISSING if v is None else Cell(cost.text(v), value=v) for v in values]
    return _mark(cells, cost.higher_is_better)


def _mark(cells: list[Cell], higher_is_better: bool) -> list[Cell]:
    """Mark the best cell and those that read the same, unless every cell does."""
    values = [cell.value for cell in cells if cell.value is not None]
    if not values:
        return cells
    top = max(values) if higher_is_better else min(values)
    text = next(cell.text for cell in cells if cell.value == top)
    if all(cell.text == text for cell in cells):
        return cells
    return [cell._replace(best=cell.text == text) for cell in cells]
