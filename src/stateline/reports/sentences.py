"""A comparison in words: what was compared, and how reliable it is."""

import json
from collections.abc import Sequence
from itertools import combinations

from stateline.reports.format import count, listing, short_number, words
from stateline.reports.records import families, runs_of, task_label
from stateline.runs.protocol_records import TOLERANCE, matched_in
from stateline.runs.results import TEACHER, Results, RunRecord, TaskRecord

QUICK = "One seed and one learning rate decide nothing."
ONE_SEED = "One seed decides nothing."
ONE_RATE = "All models have one learning rate: with another, their order may differ."


def headline(results: Results) -> str:
    """One sentence on what was trained, and whether sizes and settings were equal."""
    models, tasks = results.models, results.tasks
    counts = [n for m in models for t in tasks if (n := len(runs_of(results, m, t)))]
    most = max(counts, default=0)
    seeds = f"{'up to ' if min(counts) < most else ''}{count(most, 'seed')}" if counts else ""
    each = " each" if len(models) > 1 else ""
    how = f"{sizes(results)}, {_trainings(results)}{f' and {seeds}{each}' if seeds else ''}"
    alone = all(sum(bool(runs_of(results, m, t)) for m in models) < 2 for t in tasks)
    if alone:  # no two models to match
        how = f"trained{f' with {seeds}{each}' if seeds else ''}"
    return lost(results) + (
        f"{count(len(models), 'model')} {how} on {count(len(tasks), 'task')}: "
        f"{listing([task_label(results, task) for task in tasks])}."
    )


def lost(results: Results) -> str:
    """One sentence on the scores of a student beside its teacher's, if there is one."""
    found = list[str]()
    for task in results.tasks:
        scores = {
            model: run.by_length.get(task.train_length, {}).get(task.metric)
            for model in results.models
            for run in runs_of(results, model, task)
            if model != TEACHER or not run.steps
        }
        whole = scores.pop(TEACHER, None)
        found += [
            f"{'The student' if len(scores) == 1 else name}: {words(task.metric)} {score:.3f} at "
            f"length {task.train_length}; its teacher: {whole:.3f}. "
            for name, score in scores.items()
            if whole is not None and score is not None
        ]
    return "".join(found)


def caution(results: Results) -> str:
    """A warning about few seeds or one learning rate, or an empty string.

    Before any run has ended, the seeds that are planned count.
    """
    if len(results.models) == 1:
        return ""  # there is nothing to decide
    how = results.protocol
    seeds = [len(runs_of(results, m, t)) for m in results.models for t in results.tasks]
    if how is not None and not any(seeds):
        seeds = [len(planned) for planned in how.seeds.values()]
    several = max(seeds, default=0) > 1
    if how is not None and how.name == "quick":
        return ONE_RATE if several else QUICK
    return "" if several or not any(seeds) else ONE_SEED


def sizes(results: Results) -> str:
    """Whether the sizes of models match, and in which unit; the sizes, if they do not.

    Two models are compared on each task that both have run on, since the vocabulary of the task is
    part of the size; without such a task, on all their tasks together. Models of one architecture
    in several sizes are compared with the others of their size.
    """
    groups = size_groups(results)
    matched = all(
        _matched(runs, results)
        for group in groups.values()
        for pair in combinations(group, 2)
        for runs in _comparable_runs(results, pair)
    )
    protocol = results.protocol
    unit = matched_in(protocol.matched_by, protocol.match_length) if protocol else "parameters"
    if not matched or not unit:
        how = "of different sizes" if unit in ("", "parameters") else f"not matched in {unit}"
        return f"{how} ({_range([run.parameters for run in results.runs])} parameters)"
    if len(groups) == 1:
        return f"matched in {unit}"
    named = [short_number(size) for size in groups if size is not None]
    return f"in {len(groups)} sizes ({listing(named)} {unit}), matched within each"


def size_groups(results: Results) -> dict[int | None, list[str]]:
    """Models that may be compared: of one size, where architectures have several sizes."""
    several = len(set(families(results).values())) < len(results.models)
    sizes_of = {run.model: run.size for run in results.runs} if several else {}
    groups: dict[int | None, list[str]] = {}
    for model in results.models:
        groups.setdefault(sizes_of.get(model), []).append(model)
    return groups


def differing_sizes(results: Results, models: Sequence[str], task: TaskRecord) -> str:
    """The parameters of models on a task, as words; empty if they match."""
    runs = [run for model in models for run in runs_of(results, model, task)]
    return "" if not runs or _matched(runs, results) else _range([run.parameters for run in runs])


def _range(numbers: Sequence[int]) -> str:
    """The least and the largest number, if there are any."""
    return " to ".join(
        dict.fromkeys(short_number(n) for n in sorted(numbers)[:: len(numbers) - 1 or 1])
    )


def _comparable_runs(results: Results, pair: tuple[str, str]) -> list[list[RunRecord]]:
    by_task = [[runs_of(results, model, task) for model in pair] for task in results.tasks]
    shared = [first + second for first, second in by_task if first and second]
    alone = [[run for runs in by_task for own in runs for run in own]]
    ran = {run.model for run in results.runs}
    return shared or (alone if ran.issuperset(pair) else [])


def _matched(runs: Sequence[RunRecord], results: Results) -> bool:
    """True if all runs were to have one size, and each is within the tolerance of it."""
    protocol = results.protocol
    if protocol is not None and protocol.matched_by == "none":
        return False
    tolerance = TOLERANCE if protocol is None else protocol.tolerance
    wanted = [run.parameters_wanted if run.size is None else run.size for run in runs]
    owned = [run.parameters if run.own_size is None else run.own_size for run in runs]
    near = (abs(own - size) <= tolerance * size for own, size in zip(owned, wanted, strict=True))
    return max(wanted) <= (1 + tolerance) * min(wanted) and all(near)


def _trainings(results: Results) -> str:
    """How the training settings compare on each task, apart from the seed."""
    protocol = results.protocol
    if protocol is not None and protocol.name == "sweep":
        most = max(map(len, protocol.learning_rates.values()), default=0)
        return f"each trained with the best of {count(most, 'learning rate')} on validation data"
    for task in results.tasks:
        runs = [run for run in results.runs if run.task == task.spec]
        settings = [run.settings["training"] for run in runs]
        if len({json.dumps(s, sort_keys=True) for s in settings}) > 1:
            return "trained with different settings"
    return "trained with the same settings"


def protocol(results: Results) -> list[str]:
    """How the settings of each task's runs were chosen; empty if that is not recorded."""
    how = results.protocol
    if how is None:
        return []
    said = []
    for task in results.tasks:
        rates = ", ".join(f"{rate:g}" for rate in how.learning_rates.get(task.spec, []))
        matrices = ", ".join(f"{rate:g}" for rate in how.muon_rates.get(task.spec, []))
        decays = ", ".join(f"{decay:g}" for decay in how.weight_decays.get(task.spec, []))
        seeds = ", ".join(map(str, how.seeds.get(task.spec, [])))
        on = how.validation.get(task.spec)
        told = {
            f"learning rates {rates}": rates,
            f"Muon's learning rates {matrices}": matrices,
            f"weight decays {decays}": decays,
            f"chosen on {on}": on,
            f"scored seeds {seeds}": seeds,
        }
        listed = "; ".join(text for text, known in told.items() if known)
        said += [f"{task_label(results, task)}: {listed}."] if listed else []
    if how.rungs:
        shares = listing([f"{rung:.0%}" for rung in how.rungs])
        said.append(f"After {shares} of the steps the best {how.kept:.0%} of the trials continued.")
    if how.trial_seed is not None:
        said.append(f"Trials have the seed {how.trial_seed}, which no scored run has.")
    return said


def unfinished(results: Results) -> str:
    """The progress of unfinished results; empty if they have finished."""
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


def spent(results: Results) -> str:
    """The time that training took, with trials, and compiling; empty before the first run."""
    if not results.runs:
        return ""
    trials = sum(trial.seconds for trial in results.trials) / 60
    whole = sum(run.seconds for run in results.runs) / 60 + trials
    tried = f", {short_number(trials)} of them in trials" if results.trials else ""
    said = f"Training took {short_number(whole)} minutes, added over all runs{tried}."
    compiling = sum(run.compile_seconds for run in results.runs)
    compiling += sum(trial.compile_seconds for trial in results.trials)
    more = f" Compiling and loading kernels took {short_number(compiling)} seconds more."
    return said + (more if compiling >= 1 else "")


def baselines(task: TaskRecord) -> str:
    """Scores of programs that need no training; empty if there are none."""
    scores = [f"{name} reaches {value:.3f}" for name, value in task.baselines.items()]
    return f"For comparison, {listing(scores)}." if scores else ""
