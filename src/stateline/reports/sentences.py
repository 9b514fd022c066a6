"""A comparison in words: what was compared, and what came out of each task."""

from stateline.reports.format import count, listing, short_number, words
from stateline.reports.summary import Record, runs_of, score_cells, solved_runs, task_label


def headline(results: Record) -> str:
    """One sentence on what was compared."""
    models, tasks = results["models"], results["tasks"]
    runs = max((len(runs_of(results, m, t)) for m in models for t in tasks), default=0)
    seeds = f"{'up to ' if runs > 1 else ''}{count(runs, 'seed')} each"
    return (
        f"{count(len(models), 'model')} of about {short_number(results['parameters_wanted'])} "
        f"parameters, trained alike with {seeds} on {count(len(tasks), 'task')}: "
        f"{listing([task_label(results, task) for task in tasks])}."
    )


def unfinished(results: Record) -> str:
    """What is there of a comparison that has not finished; nothing if it has."""
    if results["finished"]:
        return ""
    pairs = [(model, task) for model in results["models"] for task in results["tasks"]]
    done = sum(bool(runs_of(results, model, task)) for model, task in pairs)
    return (
        f"This comparison has not finished. It holds {count(len(results['runs']), 'run')}, of "
        f"{done} of {count(len(pairs), 'pair')} of model and task."
    )


def verdict(results: Record, task: Record) -> str:
    """Who solved a task, and who does best at its longest length."""
    metric, wanted = words(task["metric"]), task["solved_at"]
    trained = [m for m in results["models"] if runs_of(results, m, task)]
    solved = [m for m in trained if solved_runs(runs_of(results, m, task), task)]
    if not trained:
        return "No run on this task is there yet."
    if wanted is None:
        return f"{_leaders(results, task)}."
    bound = "least" if task["higher_is_better"] else "most"
    goal = f"{metric} of at {bound} {wanted:g} at the training length, {task['train_length']}"
    if not solved:
        return f"No model solved it ({goal}), so none is scored at another length."
    beyond = max(task["eval_lengths"]) > task["train_length"]
    leaders = f" {_leaders(results, task)}." if beyond else ""
    return f"{len(solved)} of {count(len(trained), 'model')} solved it: {goal}.{leaders}"


def baselines(task: Record) -> str:
    """What programs without training reach; nothing where there are none."""
    scores = [f"{name} reaches {value:.3f}" for name, value in task["baselines"].items()]
    return f"For comparison, {listing(scores)}." if scores else ""


def _leaders(results: Record, task: Record) -> str:
    length = max(task["eval_lengths"])
    cells = dict(zip(results["models"], score_cells(results, task, length), strict=True))
    scored = {model: cell for model, cell in cells.items() if cell.value is not None}
    best = {m: c for m, c in scored.items() if c.best} or scored
    side = "highest" if task["higher_is_better"] else "lowest"
    text = next((cell.text for cell in best.values()), "")
    return (
        f"At length {length} the {side} {words(task['metric'])} is {text}, by {listing(list(best))}"
    )
