"""A comparison in words: what was compared, and the outcome of each task."""

import json
from collections.abc import Sequence
from itertools import combinations

from stateline.reports.format import count, listing, words
from stateline.reports.records import runs_of, solved_runs, task_label
from stateline.reports.table_cells import PARAMETER_TOLERANCE, score_cells
from stateline.runs.results import Results, RunRecord, TaskRecord


def headline(results: Results) -> str:
    """One sentence on what was trained, and whether sizes and settings were equal."""
    models, tasks = results.models, results.tasks
    runs = max((len(runs_of(results, m, t)) for m in models for t in tasks), default=0)
    seeds = f"{'up to ' if runs > 1 else ''}{count(runs, 'seed')}" if runs else ""
    each = " each" if len(models) > 1 else ""
    how = f"{_sizes(results)}, {_trainings(results)}{f' and {seeds}{each}' if seeds else ''}"
    alone = all(sum(bool(runs_of(results, m, t)) for m in models) < 2 for t in tasks)
    if alone:  # no two models to match
        how = f"trained{f' with {seeds}{each}' if seeds else ''}"
    return (
        f"{count(len(models), 'model')} {how} on {count(len(tasks), 'task')}: "
        f"{listing([task_label(results, task) for task in tasks])}."
    )


def _sizes(results: Results) -> str:
    """Says that the models match in parameters only if their actual sizes do.

    Two models are compared on each task that both have run on, since the vocabulary of the task is
    part of the size; without such a task, on all their tasks together.
    """
    matched = all(
        _matched(runs)
        for pair in combinations(results.models, 2)
        for runs in _comparable_runs(results, pair)
    )
    return "matched in parameters" if matched else "of different sizes"


def _comparable_runs(results: Results, pair: tuple[str, str]) -> list[list[RunRecord]]:
    by_task = [[runs_of(results, model, task) for model in pair] for task in results.tasks]
    shared = [first + second for first, second in by_task if first and second]
    alone = [[run for runs in by_task for own in runs for run in own]]
    ran = {run.model for run in results.runs}
    return shared or (alone if ran.issuperset(pair) else [])


def _matched(runs: Sequence[RunRecord]) -> bool:
    """True if all runs were to have one size, and each is within the tolerance of it."""
    wanted = [run.parameters_wanted for run in runs]
    near = (
        abs(run.parameters - run.parameters_wanted) <= PARAMETER_TOLERANCE * run.parameters_wanted
        for run in runs
    )
    return max(wanted) <= (1 + PARAMETER_TOLERANCE) * min(wanted) and all(near)


def _trainings(results: Results) -> str:
    """Says whether, on each task, the training settings were the same apart from the seed."""
    for task in results.tasks:
        runs = [run for run in results.runs if run.task == task.spec]
        settings = [run.settings["training"] for run in runs]
        if len({json.dumps(s, sort_keys=True) for s in settings}) > 1:
            return "trained with different settings"
    return "trained with the same settings"


def unfinished(results: Results) -> str:
    """How much of unfinished results is there; empty if they have finished."""
    if results.finished:
        return ""
    pairs = [(model, task) for model in results.models for task in results.tasks]
    done = sum(bool(runs_of(results, model, task)) for model, task in pairs)
    runs = count(len(results.runs), "run")
    still = [source.folder for source in results.origins() if not source.finished]
    if all(still):
        return f"Not finished yet: {listing(still)}. There are {runs} in all."
    if len(pairs) == 1:
        return "This run has not finished."
    return (
        f"This comparison has not finished: it has {runs}, for {done} of {len(pairs)} pairs of "
        "a model and a task."
    )


def verdict(results: Results, task: TaskRecord) -> str:
    """Which models solved a task, and which scores best at its longest length."""
    metric, wanted = words(task.metric), task.solved_at
    trained = [m for m in results.models if runs_of(results, m, task)]
    solved = [m for m in trained if solved_runs(runs_of(results, m, task), task)]
    if not trained:
        return "No run on this task has finished yet."
    if wanted is None:
        return _leaders(results, task)
    bound = "least" if task.higher_is_better else "most"
    goal = f"{metric} of at {bound} {wanted:g} at the training length, {task.train_length}"
    if not solved:
        return f"No model solved it ({goal}), so none is scored at other lengths."
    beyond = max(task.eval_lengths) > task.train_length
    leaders = f" {_leaders(results, task)}" if beyond else ""
    return f"{len(solved)} of {count(len(trained), 'model')} solved it: {goal}.{leaders}"


def baselines(task: TaskRecord) -> str:
    """Scores of programs that need no training; empty if there are none."""
    scores = [f"{name} reaches {value:.3f}" for name, value in task.baselines.items()]
    return f"For comparison, {listing(scores)}." if scores else ""


def _leaders(results: Results, task: TaskRecord) -> str:
    """Which models have the best score at the longest length."""
    length = max(task.eval_lengths)
    cells = zip(results.models, score_cells(results, task, length), strict=True)
    scored = {model: cell for model, cell in cells if cell.value is not None}
    best = {model: cell for model, cell in scored.items() if cell.best} or scored
    if not best:
        return f"At length {length} no model has a finite score."
    side = "highest" if task.higher_is_better else "lowest"
    text = next(iter(best.values())).text
    if len(results.models) == 1:
        return f"At length {length}: {words(task.metric)} {text}."
    names = listing([f"“{model}”" for model in best])
    return f"At length {length} the {side} {words(task.metric)} is {text}, by {names}."
