"""Look-ups in results: the runs of a model on a task, and which of them are scored.

A model that misses ``solved_at`` at its training length has learned nothing that could
generalise, so it is not scored at any other length.
"""

import math
import statistics
from collections.abc import Sequence

from stateline.charts.style import ModelStyle, styled
from stateline.runs.judged import score
from stateline.runs.results import CapacityRecord, Results, RunRecord, TaskRecord


def task_label(results: Results, task: TaskRecord) -> str:
    """The task's title, or its whole spec where two tasks have the same title."""
    titles = [other.title for other in results.tasks]
    return task.title if titles.count(task.title) == 1 else task.spec


def families(results: Results) -> dict[str, str]:
    """The architecture of each model: its own name, unless the comparison has several sizes."""
    named = {run.model: run.family for run in results.runs if run.family}
    return {model: named.get(model, model) for model in results.models}


def drawn_models(results: Results) -> dict[str, ModelStyle]:
    """How each model is drawn in all charts; the sizes of an architecture share a colour."""
    return {m.name: m for m in styled(results.models, list(families(results).values()))}


def runs_of(results: Results, model: str, task: TaskRecord) -> list[RunRecord]:
    """The runs of one model on one task, one per seed."""
    return [run for run in results.runs if run.model == model and run.task == task.spec]


def measured(results: Results, model: str, task: TaskRecord) -> list[CapacityRecord]:
    """The capacity of each seed of a model, where it was measured."""
    runs = runs_of(results, model, task)
    return [run.capacity for run in runs if run.capacity is not None]


def middle(values: Sequence[float]) -> float:
    """The median of the values that are numbers; NaN if there is none."""
    finite = [value for value in values if not math.isnan(value)]
    return statistics.median(finite) if finite else math.nan


def scored_runs(results: Results, model: str, task: TaskRecord, length: int) -> Sequence[RunRecord]:
    """The runs of a model that may be scored at a length."""
    runs = runs_of(results, model, task)
    return runs if length == task.train_length else solved_runs(runs, task)


def scores_of(
    results: Results, task: TaskRecord, length: int, models: Sequence[str]
) -> dict[str, list[float]]:
    """The scores of models at a length, one per seed that may be scored; none of other models."""
    runs = {model: scored_runs(results, model, task, length) for model in models}
    return {m: [score(run, task, length) for run in own] for m, own in runs.items() if own}


def solved_runs(runs: Sequence[RunRecord], task: TaskRecord) -> list[RunRecord]:
    """The runs that may be scored beyond the training length.

    These are the runs that reached ``solved_at`` at it (all runs if the task is never solved), and
    none at all if the majority of the seeds did not.
    """
    if task.solved_at is None:
        return list(runs)
    solved = [run for run in runs if _reached_goal(run, task)]
    return solved if 2 * len(solved) >= len(runs) else []


def looks(results: Results) -> int:
    """How often seeds were looked at while they were added."""
    return 1 if results.protocol is None else results.protocol.looks


def steps_to_solve(run: RunRecord, task: TaskRecord) -> int | None:
    """Updates until a run first reached ``solved_at``; ``None`` if its final score does not.

    The final score comes from more problems than the scores during training. If only the final
    score reaches the goal, the run needed all its updates.
    """
    if task.solved_at is None or not _reached_goal(run, task):
        return None
    return run.steps if run.steps_to_solve is None else run.steps_to_solve


def _reached_goal(run: RunRecord, task: TaskRecord) -> bool:
    value, goal = score(run, task, task.train_length), task.solved_at
    assert goal is not None
    return value >= goal if task.higher_is_better else value <= goal
