"""The cells of a report's tables, one per model: from the results of runs to numbers to read.

Where a model is not scored, because it has learned nothing that could generalise, its cell says so.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stateline.reports.costs import Cost
from stateline.reports.format import DASH, short_number
from stateline.reports.records import Record, measured, runs_of, score, solved_runs

PARAMETER_TOLERANCE = 0.05
"""Share of the wanted parameters that a model may be off before the table marks it."""


class Cell(NamedTuple):
    """One number of a table.

    Attributes:
        text: The number as shown, or the reason why there is none.
        note: What belongs beside it in small print: the spread, how many seeds.
        value: What it is compared and sorted by; ``None`` where there is nothing to compare.
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
ANY = Cell("any")


def score_cells(results: Record, task: Record, length: int) -> list[Cell]:
    """How well each model does a task at one length, as far as it is scored there.

    Where none has solved a task that can be solved, none is the best: chance would choose it.
    """
    cells, learned = [], task["solved_at"] is None
    for model in results["models"]:
        runs = runs_of(results, model, task)
        learned = learned or bool(solved_runs(runs, task))
        scored = runs if length == task["train_length"] else solved_runs(runs, task)
        values = [score(run, task, length) for run in scored]
        cells.append(_score_cell(values, len(runs)))
    return _mark(cells, task["higher_is_better"]) if learned else cells


def steps_cells(results: Record, task: Record) -> list[Cell]:
    """After how many steps each model had solved a task."""
    cells = []
    for model in results["models"]:
        steps = [run["steps_to_solve"] for run in runs_of(results, model, task)]
        cells.append(_steps_cell(steps))
    return _mark(cells, False)


def reached_cells(results: Record, task: Record, goal: float) -> list[Cell]:
    """At which step each model's score was first as high as this."""
    cells = []
    for model in results["models"]:
        steps = []
        for run in runs_of(results, model, task):
            scored = [point for point in run["curve"] if point["metric"] is not None]
            steps.append(next((p["step"] for p in scored if p["metric"] >= goal), None))
        cells.append(_steps_cell(steps))
    return _mark(cells, False)


def parameter_cells(models: Sequence[str], runs: Sequence[Record]) -> list[Cell]:
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
        largest = counts[-1] if counts else None
        cells.append(Cell(DASH.join(ends) or MISSING.text, value=largest, off=off))
    return cells


def cost_cells(results: Record, cost: Cost, length: int) -> list[Cell]:
    """What each model costs at one length, where that was measured."""
    measured = {
        entry["model"]: entry[cost.field][str(length)]
        for entry in results["speed"]
        if str(length) in entry[cost.field]
    }
    values = [measured.get(model) for model in results["models"]]
    cells = [MISSING if v is None else Cell(cost.text(v), value=v) for v in values]
    return _mark(cells, cost.higher_is_better)


def longest_copy_cells(results: Record) -> list[Cell]:
    """The longest string that fits the state of each model, in letters."""
    cells = {}
    for entry in results["speed"]:
        if "longest_copy" in entry:
            longest = entry["longest_copy"]
            known = longest is not None
            cells[entry["model"]] = Cell(short_number(longest), value=longest) if known else ANY
    return [cells.get(model, MISSING) for model in results["models"]]


def capacity_cells(results: Record, task: Record) -> list[Cell]:
    """Bits of its state that each model needs for a task, where that was measured."""
    return [_capacity_cell(measured(results, model, task)) for model in results["models"]]


def median_cell(runs: Sequence[Record], field: str, form: Callable[[float], str]) -> Cell:
    """The median of a field over the seeds of a model."""
    if not runs:
        return MISSING
    value = statistics.median(run[field] for run in runs)
    return Cell(form(value), value=value)


def setting_cell(runs: Sequence[Record], name: str) -> Cell:
    """One setting of the training of a model; all its values where its seeds differ in it."""
    values = [run["training"][name] for run in runs if name in run.get("training", {})]
    texts = dict.fromkeys(v if isinstance(v, str) else json.dumps(v) for v in values)
    number = values[0] if len(texts) == 1 and type(values[0]) in (int, float) else None
    return Cell(", ".join(texts), value=number) if texts else MISSING


def _score_cell(values: Sequence[float], seeds: int) -> Cell:
    """Median and spread of the seeds that are scored, and how many of all they are."""
    if not values:
        return NOT_SOLVED if seeds else MISSING
    value = statistics.median(values)
    spread = f"{min(values):.3f}{DASH}{max(values):.3f}" if min(values) < max(values) else ""
    partial = f"{len(values)}/{seeds} solved" if len(values) < seeds else ""
    note = ", ".join(filter(None, [spread, partial]))
    return Cell(f"{value:.3f}", note, value if math.isfinite(value) else None)


def _capacity_cell(found: Sequence[Record]) -> Cell:
    """Median and spread over the seeds; "more" for those of which even the most bits were few."""
    bits = [math.inf if f["needed"] is None else f["needed"] * f["numbers"] for f in found]
    if not bits:
        return MISSING
    low, value, high = (
        short_number(b) if math.isfinite(b) else "more"
        for b in (min(bits), statistics.median_low(bits), max(bits))
    )
    return Cell(value, f"{low}{DASH}{high}" if low != high else "", statistics.median_low(bits))


def _steps_cell(steps: Sequence[int | None]) -> Cell:
    """Median with "never" as the largest number of all: it wins where the majority never solved."""
    if not steps:
        return MISSING
    solved = [s for s in steps if s is not None]
    note = f"{len(solved)}/{len(steps)} solved" if 0 < len(solved) < len(steps) else ""
    value = statistics.median_low([math.inf if s is None else s for s in steps])
    return Cell(f"{value:,.0f}", note, value) if math.isfinite(value) else Cell("never", note)


def _mark(cells: list[Cell], higher_is_better: bool) -> list[Cell]:
    """Mark the best cell and those that read the same, unless every cell does."""
    values = [cell.value for cell in cells if cell.value is not None]
    if not values:
        return cells
    top = max(values) if higher_is_better else min(values)
    text = next(cell.text for cell in cells if cell.value == top)
    if all(cell.text == text for cell in cells if cell != MISSING):
        return cells
    return [cell._replace(best=cell.text == text) for cell in cells]
