"""The cells of a report's tables, one per model.

The cell of a model that is not scored, because it has not solved the training length, says so.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import UNSET

from stateline.reports.answers import Answers
from stateline.reports.costs import Cost, Interval, best_costs
from stateline.reports.format import DASH, short_number
from stateline.reports.records import (
    measured,
    middle,
    runs_of,
    solved_runs,
    steps_to_solve,
)
from stateline.runs.protocol_records import TOLERANCE
from stateline.runs.results import CapacityRecord, Results, RunRecord, TaskRecord


class Cell(NamedTuple):
    """One number of a table.

    Attributes:
        text: The number as shown, or the reason why it is missing.
        note: Small print: the spread, the number of seeds.
        value: Key for comparing and sorting; ``None`` if there is no number.
        best: True for the best number of a column, and for numbers that are not clearly worse.
        off: True for a parameter count too far from the intended one.
    """

    text: str
    note: str = ""
    value: float | None = None
    best: bool = False
    off: bool = False

    @property
    def is_empty(self) -> bool:
        """True if there is no number to show."""
        return self.text in (MISSING.text, NOT_SOLVED.text, DIVERGED.text)


MISSING = Cell(DASH)
NOT_SOLVED = Cell("not solved")
DIVERGED = Cell("diverged")
ANY = Cell("any", value=math.inf)


def score_cells(found: Answers, task: TaskRecord, length: int) -> list[Cell]:
    """The score of each model on a task at one length.

    Models that are not clearly worse than the best of their size are marked, if any is.
    """
    results, own = found.results, found.of(task, length)
    scores = {model: values for answer in own for model, values in answer.scores.items()}
    marked = {model for answer in own for model in answer.marked}
    return [
        _score_cell(
            scores.get(model, []),
            sum(steps_to_solve(run, task) is not None for run in runs),
            len(runs),
        )._replace(best=model in marked)
        for model in results.models
        for runs in [runs_of(results, model, task)]
    ]


def steps_cells(results: Results, task: TaskRecord) -> list[Cell]:
    """Steps after which each model had solved a task."""
    return [
        _steps_cell([steps_to_solve(run, task) for run in runs_of(results, model, task)])
        for model in results.models
    ]


def reached_cells(results: Results, task: TaskRecord, goal: float) -> list[Cell]:
    """The step at which each model's score first reached a goal."""
    cells = []
    for model in results.models:
        steps = []
        for run in runs_of(results, model, task):
            scored = ((p.step, p.metric) for p in run.curve if p.metric is not None)
            steps.append(next((step for step, metric in scored if metric >= goal), None))
        cells.append(_steps_cell(steps))
    return cells


def parameter_cells(models: Sequence[str], runs: Sequence[RunRecord]) -> list[Cell]:
    """Parameters of each model; a range if they depend on the vocabulary of the task."""
    cells = []
    for model in models:
        own = [run for run in runs if run.model == model]
        counts = sorted({run.parameters for run in own})
        ends = dict.fromkeys(short_number(n) for n in (*counts[:1], *counts[-1:]))
        off = any(
            abs(run.parameters - run.parameters_wanted) > TOLERANCE * run.parameters_wanted
            for run in own
        )
        largest = counts[-1] if counts else None
        cells.append(Cell(DASH.join(ends) or MISSING.text, value=largest, off=off))
    return cells


def cost_cells(results: Results, cost: Cost, length: int) -> list[Cell]:
    """A cost of each model at one length, if it was measured."""
    known = {entry.model: cost.values(entry).get(length) for entry in results.speed}
    found = {model: value for model, value in known.items() if value is not None}
    best = best_costs(found, cost)
    return [_cost_cell(found.get(m), cost, best=m in best) for m in results.models]


def _cost_cell(found: Interval | None, cost: Cost, *, best: bool) -> Cell:
    """Median and spread of a cost."""
    if found is None:
        return MISSING
    ends = list(dict.fromkeys(cost.text(end) for end in (found.low, found.high)))
    note = DASH.join(ends) if len(ends) > 1 else ""
    return Cell(cost.text(found.middle), note, found.middle, best)


def longest_copy_cells(results: Results) -> list[Cell]:
    """Letters of the longest string that fits into the state of each model that solved a task.

    It is a bound, not a measurement: of a model that learned nothing it would say nothing.
    """
    cells = {}
    for entry in results.speed:
        longest = entry.longest_copy
        solved = any(
            solved_runs(runs_of(results, entry.model, task), task) for task in results.tasks
        )
        if longest is not UNSET and solved:
            cell = ANY if longest is None else Cell(short_number(longest), value=longest)
            cells[entry.model] = cell
    return [cells.get(model, MISSING) for model in results.models]


def capacity_cells(results: Results, task: TaskRecord) -> list[Cell]:
    """Bits of the state that each model needs for a task, if they were measured."""
    return [_capacity_cell(measured(results, model, task)) for model in results.models]


def median_cell(runs: Sequence[RunRecord], field: str, form: Callable[[float], str]) -> Cell:
    """The median of a field over the seeds of a model."""
    if not runs:
        return MISSING
    value = statistics.median(getattr(run, field) for run in runs)
    return Cell(form(value), value=value)


def setting_cell(runs: Sequence[RunRecord], name: str) -> Cell:
    """A training setting of a model; all its values if the seeds differ."""
    values = [run.training[name] for run in runs if name in run.training]
    texts = dict.fromkeys(v if isinstance(v, str) else json.dumps(v) for v in values)
    number = values[0] if len(texts) == 1 and type(values[0]) in (int, float) else None
    return Cell(", ".join(texts), value=number) if texts else MISSING


def _score_cell(values: Sequence[float], solved: int, seeds: int) -> Cell:
    """Median and spread of the scored seeds; how many diverged, and how many solve the task."""
    partial = f"{solved}/{seeds} solved" if 0 < solved < seeds else ""
    if not values:
        return NOT_SOLVED._replace(note=partial) if seeds else MISSING
    finite = [own for own in values if not math.isnan(own)]
    if not finite:
        return DIVERGED._replace(note=partial)
    spread = f"{min(finite):.3f}{DASH}{max(finite):.3f}" if len({*finite}) > 1 else ""
    lost = len(values) - len(finite)
    diverged = f"{lost}/{len(values)} diverged" if lost else ""
    value, note = middle(finite), ", ".join(filter(None, [spread, diverged, partial]))
    return Cell(f"{value:.3f}", note, value)


def _capacity_cell(found: Sequence[CapacityRecord]) -> Cell:
    """Median and spread over the seeds; "more" where even the most bits did not suffice."""
    bits = [math.inf if f.needed is None else f.needed * f.numbers for f in found]
    if not bits:
        return MISSING
    low, value, high = (
        short_number(b) if math.isfinite(b) else "more"
        for b in (min(bits), statistics.median_low(bits), max(bits))
    )
    return Cell(value, f"{low}{DASH}{high}" if low != high else "", statistics.median_low(bits))


def _steps_cell(steps: Sequence[int | None]) -> Cell:
    """Median, where "never" counts as infinite: it is the result if most seeds never solved."""
    if not steps:
        return MISSING
    solved = [s for s in steps if s is not None]
    note = f"{len(solved)}/{len(steps)} solved" if 0 < len(solved) < len(steps) else ""
    value = statistics.median_low([math.inf if s is None else s for s in steps])
    return Cell(f"{value:,.0f}", note, value) if math.isfinite(value) else Cell("never", note)
