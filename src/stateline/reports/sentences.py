"""A comparison in words: what was compared, and what came out of each task."""

import json

from stateline.reports.cells import PARAMETER_TOLERANCE, score_cells
from stateline.reports.format import count, listing, words
from stateline.reports.records import Record, runs_of, solved_runs, sources, task_label


def headline(results: Record) -> str:
    """One sentence on what was trained, and whether it was all alike."""
    models, tasks = results["models"], results["tasks"]
    runs = max((len(runs_of(results, m, t)) for m in models for t in tasks), default=0)
    seeds = f" with {'up to ' if runs > 1 else ''}{count(runs, 'seed')} each" if runs else ""
    how = f" {_sizes(results)}, {_trainings(results)}"
    alone = all(sum(bool(runs_of(results, m, t)) for m in models) < 2 for t in tasks)
    if alone:  # nothing to match
        how = " trained"
    if len(models) == 1:
        seeds = seeds.removesuffix(" each")
    return (
        f"{count(len(models), 'model')}{how}{seeds} on {count(len(tasks), 'task')}: "
        f"{listing([task_label(results, task) for task in tasks])}."
    )


def _sizes(results: Record) -> str:
    """Whether, on each task, the models were to have the same number of parameters."""
    for task in results["tasks"]:
        wanted = [r["parameters_wanted"] for r in results["runs"] if r["task"] == task["spec"]]
        if wanted and max(wanted) > (1 + PARAMETER_TOLERANCE) * min(wanted):
            return "of different sizes"
    return "matched in parameters"


def _trainings(results: Record) -> str:
    """Whether, on each task, the models had the same training configuration but for the seed."""
    for task in results["tasks"]:
        runs = [run for run in results["runs"] if run["task"] == task["spec"]]
        settings = [run.get("training", {}) | {"seed": 0} for run in runs]
        if len({json.dumps(s, sort_keys=True) for s in settings}) > 1:
            return "trained in different ways"
    return "trained alike"


def unfinished(results: Record) -> str:
    """What is there of runs that have not finished; nothing if all have."""
    if results["finished"]:
        return ""
    pairs = [(model, task) for model in results["models"] for task in results["tasks"]]
    done = sum(bool(runs_of(results, model, task)) for model, task in pairs)
    runs = count(len(results["runs"]), "run")
    still = [source["folder"] for source in sources(results) if not source["finished"]]
    if all(still):
        return f"Not finished yet: {listing(still)}. There are {runs} in all."
    if len(pairs) == 1:
        return "This run has not finished."
    return (
        f"This comparison has not finished: it holds {runs}, for {done} of {len(pairs)} pairs of "
        "a model and a task."
    )


def verdict(results: Record, task: Record) -> str:
    """Who solved a task, and who does best at its longest length."""
    metric, wanted = words(task["metric"]), task["solved_at"]
    trained = [m for m in results["models"] if runs_of(results, m, task)]
    solved = [m for m in trained if solved_runs(runs_of(results, m, task), task)]
    if not trained:
        return "No run on this task is there yet."
    if wanted is None:
        return _leaders(results, task)
    bound = "least" if task["higher_is_better"] else "most"
    goal = f"{metric} of at {bound} {wanted:g} at the training length, {task['train_length']}"
    if not solved:
        return f"No model solved it ({goal}), so none is scored at another length."
    beyond = max(task["eval_lengths"]) > task["train_length"]
    leaders = f" {_leaders(results, task)}" if beyond else ""
    return f"{len(solved)} of {count(len(trained), 'model')} solved it: {goal}.{leaders}"


def baselines(task: Record) -> str:
    """What programs without training reach; nothing where there are none."""
    scores = [f"{name} reaches {value:.3f}" for name, value in task["baselines"].items()]
    return f"For comparison, {listing(scores)}." if scores else ""


def _leaders(results: Record, task: Record) -> str:
    """Who has the best score at the longest length."""
    length = max(task["eval_lengths"])
    cells = zip(results["models"], score_cells(results, task, length), strict=True)
    scored = {model: cell for model, cell in cells if cell.value is not None}
    best = {model: cell for model, cell in scored.items() if cell.best} or scored
    if not best:
        return f"At length {length} no score is a number."
    side = "highest" if task["higher_is_better"] else "lowest"
    text = next(iter(best.values())).text
    if len(results["models"]) == 1:
        return f"At length {length}: {words(task['metric'])} {text}."
    names = listing([f"“{model}”" for model in best])
    return f"At length {length} the {side} {words(task['metric'])} is {text}, by {names}."
