"""The conclusions of a comparison, in sentences that claim no more than its spread allows."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from stateline.reports.answers import Answer, Answers
from stateline.reports.costs import STATE, Cost, Interval, common_lengths, disturbance, speed
from stateline.reports.decision import solvers, unequal
from stateline.reports.format import count, listing, quoted, short_number, words
from stateline.reports.records import task_label
from stateline.reports.sentences import differing_sizes
from stateline.runs.results import Results, TaskRecord
from stateline.runs.verdict import Pair

JUDGED = (speed("decode"), speed("prefill"), speed("train"))
"""Speeds that are judged, at the largest length at which all models were measured."""


def conclusions(found: Answers) -> list[tuple[str, list[str]]]:
    """What the results show: for each task, and for the costs, its label and sentences."""
    results = found.results
    said = [(task_label(results, task), task_conclusion(found, task)) for task in results.tasks]
    said.append(("Cost", cost_conclusion(results)))
    return [(label, sentences) for label, sentences in said if sentences]


def task_conclusion(found: Answers, task: TaskRecord) -> list[str]:
    """Which models solved a task, and which are told apart, at the training length and beyond.

    Models are judged among models of their size. Beyond the training length only models that solved
    it are judged.
    """
    sentences: list[str] = []
    for length in dict.fromkeys([task.train_length, max(task.eval_lengths)]):
        for answer in found.of(task, length):
            sentences += [] if answer.beyond else filter(None, [solvers(answer)])
            sentences += _judged(found.results, answer)
    if not any(run.task == task.spec for run in found.results.runs):
        return ["No run on this task has finished yet."]
    return sentences


def _judged(results: Results, answer: Answer) -> list[str]:
    """The sentences on the scores of models that may be compared, at one length."""
    scores, verdict = answer.scores, answer.verdict
    at = f"At length {answer.length:,}"
    at += "" if answer.size is None else f", size {short_number(answer.size)}"
    numbers = {len(own) for own in scores.values()}
    if len(numbers) == 1 and max(numbers) > 1:
        at += f" ({count(max(numbers), 'seed')})"
    told = [f"{words(answer.task.metric)} of {_scores(verdict.order, scores)}"] * bool(
        verdict.order
    )
    told += filter(None, [unequal(answer)])
    sentences = [f"{at}, {said}." for said in told]
    for better, pairs in groupby((p for p in verdict.pairs if p.told), lambda pair: pair.better):
        sentences.append(f"“{better}” is clearly better than {quoted(p.worse for p in pairs)}.")
    same = [f"“{p.better}” and “{p.worse}”" for p in verdict.pairs if not p.told]
    sentences += [f"Not told apart: {'; '.join(same)}."] if same else []
    sentences += [f"{at}, {said}" for said in _undecided(answer)]
    if verdict.better and (range_ := differing_sizes(results, list(scores), answer.task)):
        sentences.append(
            f"These models have different sizes ({range_} parameters): this says nothing about "
            "architectures of equal size."
        )
    return sentences


class PairRow(NamedTuple):
    """A pair of models in words.

    Attributes:
        pair: Both models, the better one first.
        difference: The difference of their mean scores, or the shares of seeds that were compared.
        interval: The interval of the difference that goes with the verdict.
        verdict: Whether they are told apart, after how many seeds and minutes of training of both.
    """

    pair: str
    difference: str
    interval: str
    verdict: str


def pair_rows(answer: Answer) -> list[PairRow]:
    """All pairs of an answer, those told apart first."""
    ordered = sorted(answer.verdict.pairs, key=lambda pair: not pair.told)
    return [_pair_row(answer, pair) for pair in ordered]


def _pair_row(answer: Answer, pair: Pair) -> PairRow:
    found = pair.difference
    low, high = found.interval
    difference = f"{found.value:+.3f}"
    if found.shares:
        one, other = (f"{share.good} of {share.seeds}" for share in found.shares)
        difference = f"{one} against {other} seeds"
    seeds = answer.seeds_until_told(pair.better, pair.worse)
    minutes = sum(answer.seconds[model] for model in (pair.better, pair.worse)) / 60
    after = f"{count(seeds, 'seed')} each, {short_number(minutes)} min of training"
    if not pair.told and (more := answer.seeds_to_tell(pair)):
        after += f"; {more} seeds may"
    return PairRow(
        f"“{pair.better}” against “{pair.worse}”",
        difference,
        f"{low:+.3f} to {high:+.3f}",
        f"told apart after {after}" if pair.told else f"not told apart ({after})",
    )


def _undecided(answer: Answer) -> list[str]:
    """Models of which nothing is claimed: a seed diverged, or they alone have only one."""
    scores, undecidable = answer.scores, answer.verdict.undecidable
    diverged = [model for model in undecidable if any(map(math.isnan, scores[model]))]
    single = [m for m in undecidable if m not in diverged] if answer.verdict.order else []
    return [
        f"{why}nothing is claimed about {_scores(models, scores)}."
        for why, models in (("", diverged), ("with one seed, ", single))
        if models
    ]


def _scores(models: Sequence[str], scores: Mapping[str, list[float]]) -> str:
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


def _speeds(models: Sequence[str], known: dict[str, Interval]) -> str:
    ordered = sorted(models, key=lambda model: -known[model].middle)
    return listing([f"“{m}” {short_number(known[m].middle)} tokens/s" for m in ordered])
