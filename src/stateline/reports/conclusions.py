"""The conclusions of a comparison, in sentences that claim no more than its spread allows."""

import math
import statistics
from collections.abc import Sequence

from stateline.reports.costs import STATE, Cost, Measured, common_lengths, disturbance, speed
from stateline.reports.format import count, listing, short_number, words
from stateline.reports.records import (
    judged,
    runs_of,
    scores_of,
    solved_runs,
    steps_to_solve,
    task_label,
)
from stateline.reports.sentences import differing_sizes, goal, size_groups
from stateline.runs.results import Results, TaskRecord
from stateline.runs.verdict import Verdict

JUDGED = (speed("decode"), speed("prefill"), speed("train"))
"""Speeds that are judged, at the largest length at which all models were measured."""


def conclusions(results: Results) -> list[tuple[str, list[str]]]:
    """What the results show: for each task, and for the costs, its label and sentences."""
    found = [(task_label(results, task), task_conclusion(results, task)) for task in results.tasks]
    found.append(("Cost", cost_conclusion(results)))
    return [(label, sentences) for label, sentences in found if sentences]


def task_conclusion(results: Results, task: TaskRecord) -> list[str]:
    """Which models solved a task, and which are clearly better, at the training length and beyond.

    Models are judged among models of their size. Beyond the training length only models that solved
    it are judged.
    """
    trained = [m for m in results.models if runs_of(results, m, task)]
    if not trained:
        return ["No run on this task has finished yet."]
    solved = [m for m in trained if solved_runs(runs_of(results, m, task), task)]
    sentences = []
    if task.solved_at is not None:
        runs = [run for model in trained for run in runs_of(results, model, task)]
        some = any(steps_to_solve(run, task) is not None for run in runs)
        sentences.append(_solved(trained, solved, task, some=some))
    longest = max(task.eval_lengths)
    lengths = [task.train_length, *([longest] if longest != task.train_length and solved else [])]
    for length in lengths:
        for size, group in size_groups(results).items():
            at = f"At length {length:,}" + ("" if size is None else f", size {short_number(size)}")
            sentences += _judged(results, task, length, group, at)
    return sentences


def _solved(trained: Sequence[str], solved: Sequence[str], task: TaskRecord, *, some: bool) -> str:
    if not solved:
        most = " with most of its seeds" if some else ""
        if len(trained) == 1:
            return f"It was not solved{most} ({goal(task)}), so it is not scored at other lengths."
        return f"No model solved it{most} ({goal(task)}), so none is scored at other lengths."
    if len(solved) == len(trained) == 1:
        return f"It was solved: {goal(task)}."
    which = "All" if len(solved) == len(trained) else f"{len(solved)} of"
    return f"{which} {count(len(trained), 'model')} solved it: {goal(task)}."


def _judged(
    results: Results, task: TaskRecord, length: int, models: Sequence[str], at: str
) -> list[str]:
    """The sentences on the scores of models that may be compared, at one length."""
    scores = scores_of(results, task, length, models)
    if not scores:
        return []
    if len(scores) == 1:
        ((model, own),) = scores.items()
        alone = "" if len(results.models) == 1 else f"only “{model}” is scored: "
        seeds = f" ({count(len(own), 'seed')})" if len(own) > 1 else ""
        return [f"{at}{seeds}, {alone}{words(task.metric)} {_spread(own)}."]
    found = judged(results, task, length, scores)
    metric = words(task.metric)
    numbers = {len(own) for own in scores.values()}
    if len(numbers) == 1 and max(numbers) > 1:
        at += f" ({count(max(numbers), 'seed')})"
    told = [_ranking(found, scores, metric)] if found.order else []
    sentences = [f"{at}, {said}" for said in told + _undecided(found, scores)]
    if found.better and (range_ := differing_sizes(results, list(scores), task)):
        sentences.append(
            f"These models have different sizes ({range_} parameters): this says nothing about "
            "architectures of equal size."
        )
    return sentences


def ranked(found: Verdict) -> tuple[list[str], list[str]]:
    """The best model and the models not clearly worse than it; and the worse ones."""
    best, *others = found.order
    worse = [model for model in others if (best, model) in found.better]
    return [best, *(model for model in others if model not in worse)], worse


def _ranking(found: Verdict, scores: dict[str, list[float]], metric: str) -> str:
    """Which models are best, which are not told apart from them, which are clearly worse."""
    same, worse = ranked(found)
    best = same[0]
    if len(same) > 1:
        said = f"not told apart in {metric}: {_scores(same, scores)}."
        return f"{said} Clearly worse than “{best}”: {_scores(worse, scores)}." if worse else said
    if not worse:
        return f"{metric} of {_scores(same, scores)}."
    if found.undecidable:
        return f"clearly better in {metric}: {_scores(same, scores)} than {_scores(worse, scores)}."
    end = f"{_spread(scores[best])}, before {_scores(worse, scores)}"
    return f"“{best}” is clearly best in {metric}, {end}."


def _undecided(found: Verdict, scores: dict[str, list[float]]) -> list[str]:
    """Models of which nothing is claimed: a seed diverged, or they alone have only one."""
    diverged = [model for model in found.undecidable if any(map(math.isnan, scores[model]))]
    single = [m for m in found.undecidable if m not in diverged] if found.order else []
    return [
        f"{why}nothing is claimed about {_scores(models, scores)}."
        for why, models in (("", diverged), ("with one seed, ", single))
        if models
    ]


def _scores(models: Sequence[str], scores: dict[str, list[float]]) -> str:
    return listing([f"“{model}” {_spread(scores[model])}" for model in models])


def _spread(scores: Sequence[float]) -> str:
    """Median, lowest and highest of the seeds; how many of them diverged."""
    finite = [value for value in scores if not math.isnan(value)]
    lost = len(scores) - len(finite)
    failed = [f"{lost} of {count(len(scores), 'seed')} diverged"] if lost else []
    if not finite:
        return f"({failed[0]})"
    ends = [] if len(finite) == 1 else [f"{min(finite):.3f} to {max(finite):.3f}"]
    notes = ", ".join(ends + failed)
    return f"{statistics.median(finite):.3f}" + (f" ({notes})" if notes else "")


def cost_conclusion(results: Results) -> list[str]:
    """Which models are fastest, and how large their states are."""
    if len(results.speed) < 2:
        return []
    sentences = []
    lengths, known = common_lengths(results, STATE), [e for e in results.speed if e.state_bytes]
    if lengths and len(known) > 1:
        sizes = {entry.model: STATE.values(entry)[lengths[-1]].middle for entry in known}
        ends = [min(sizes, key=lambda m: sizes[m]), max(sizes, key=lambda m: sizes[m])]
        told = " to ".join(f"{STATE.text(sizes[model])} (“{model}”)" for model in ends)
        if sizes[ends[0]] == sizes[ends[1]]:
            told = f"{STATE.text(sizes[ends[0]])} for every model"
        sentences.append(f"State after {lengths[-1]:,} tokens: {told}.")
    if disturbance(results):
        return [*sentences, "Other programs ran: nothing is claimed about speeds."]
    return sentences + [said for cost in JUDGED if (said := _fastest(results, cost))]


def _fastest(results: Results, cost: Cost) -> str:
    """The fastest model, and all whose spread overlaps its spread; empty if not measured."""
    lengths = common_lengths(results, cost)
    if not lengths:
        return ""
    known = {e.model: cost.values(e)[lengths[-1]] for e in results.speed if cost.values(e)}
    if len(known) < 2:
        return ""
    best = max(known, key=lambda model: known[model].middle)
    same = [m for m in known if m != best and known[m].high >= known[best].low]
    place = f"{cost.title} at {lengths[-1]:,} tokens"
    if all(own.low == own.high for own in known.values()):
        once = "measured once, so differences may be noise"
        return f"{place}, {once}: {_speeds(list(known), known)}."
    if same:
        return f"{place}: no clear fastest among {_speeds([best, *same], known)}."
    rest = [model for model in known if model != best]
    fastest = f"{short_number(known[best].middle)} tokens/s"
    return f"{place}: “{best}” is fastest, {fastest}; then {_speeds(rest, known)}."


def _speeds(models: Sequence[str], known: dict[str, Measured]) -> str:
    ordered = sorted(models, key=lambda model: -known[model].middle)
    return listing([f"“{m}” {short_number(known[m].middle)} tokens/s" for m in ordered])
