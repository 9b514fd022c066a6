"""The answers of a comparison: for each task, size and length, everything that follows from scores.

Models are judged here and nowhere else: pages, tables, sentences and charts show these values.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from stateline.reports.budgets import Budget, cost_at, length_at
from stateline.reports.costs import STATE
from stateline.reports.format import short_number
from stateline.reports.records import (
    looks,
    middle,
    runs_of,
    scored_runs,
    scores_of,
    steps_to_solve,
    task_label,
)
from stateline.reports.sentences import size_groups
from stateline.runs.judged import kind_of, verdict_of
from stateline.runs.results import Results, TaskRecord
from stateline.runs.verdict import (
    ERROR_RATE,
    FIRST_LOOK,
    Pair,
    ScoreKind,
    Share,
    Verdict,
    compare,
    seeds_to_tell,
)

CLOSE = 0.01
"""Scores count as equal within this share of the range or of the best score; cost then decides."""

CHEAPER = 0.5
"""Largest state of the next choice, relative to the best model's, if any model is that small."""


class Choice(NamedTuple):
    """Which model to take.

    Attributes:
        model: The model; ``None`` if none is within the budgets, or the best one only guesses.
        best: The model with the best score within the budgets; ``None`` if there is none.
        following: The next choice: the best model beyond the budgets if it is better, else the best
            one with a much smaller state, else the best other one.
        rivals: The other models within the budgets.
        alike: Those of them that are not told apart from the choice.
        seeds: How many seeds of the same spread would tell more of them apart; ``None`` if not even
            three times the seeds would.
    """

    model: str | None
    best: str | None = None
    following: str | None = None
    rivals: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    seeds: int | None = None


class Answer(NamedTuple):
    """What one task says about models of one size at one length.

    Attributes:
        task: The task.
        label: Its name, with the size of the models if there are several.
        size: The size of the models; ``None`` if there are no several sizes.
        length: The length of the scored sequences.
        models: The models that were compared.
        scores: The scores per seed of each model that is scored here, the best median first. Models
            all of whose seeds diverged are last.
        verdict: Every pair of models, with its difference, interval and verdict.
        solved: How many seeds of each model solved the task at its training length.
        updates: Updates of the shortest and of the longest run behind the scores.
        choice: Which model to take.
        within: The same within the budgets.
        seconds: Training time of each model on this task, of all seeds and trials.
        looks: How often seeds were looked at while they were added.
    """

    task: TaskRecord
    label: str
    size: int | None
    length: int
    models: Sequence[str]
    scores: Mapping[str, list[float]]
    verdict: Verdict
    solved: Mapping[str, Share]
    updates: tuple[int, int]
    choice: Choice
    within: Choice
    seconds: Mapping[str, float]
    looks: int

    @property
    def marked(self) -> list[str]:
        """The best model and those not told apart from it, if any model is clearly worse."""
        best, *others = self.verdict.order or [""]
        same = [model for model in others if (best, model) not in self.verdict.better]
        return [best, *same] if len(same) < len(others) else []

    @property
    def beyond(self) -> bool:
        """Whether the length is not the training length."""
        return self.length != self.task.train_length

    def seeds_until_told(self, better: str, worse: str) -> int:
        """After how many seeds of each a pair was told apart, or all seeds of the pair."""
        first, second = self.scores[better], self.scores[worse]
        rate = ERROR_RATE / max(1, len(self.verdict.pairs))
        last = min(len(first), len(second))
        for n in range(FIRST_LOOK, last) if self.looks > 1 else ():
            seen = compare(first[:n], second[:n], kind_of(self.task), looks=self.looks)
            if seen.chance < rate:
                return n
        return last

    def seeds_to_tell(self, pair: Pair) -> int | None:
        """How many seeds of the same spread would tell a pair apart, at most three times these."""
        return _seeds_to_tell(
            self.scores, self.verdict, kind_of(self.task), pair.better, pair.worse
        )


class Answers(NamedTuple):
    """All answers of some results within some budgets.

    Attributes:
        results: The results.
        budgets: Limits on the costs of models.
        every: The answers by task, size and length.
    """

    results: Results
    budgets: Sequence[Budget]
    every: Sequence[Answer]

    def of(self, task: TaskRecord, length: int) -> list[Answer]:
        """The answers of a task at a length, one per size."""
        return [own for own in self.every if own.task is task and own.length == length]

    def decided(self) -> list[Answer]:
        """At the training length, and at the longest at which a model is above chance."""
        return [
            own
            for own in self.every
            if own.length in decided_lengths(self.results, own.task, own.models)
        ]


def answers(results: Results, budgets: Sequence[Budget] = ()) -> Answers:
    """Judge the models of results, once."""
    found = [
        _answer(results, task, length, size, models, budgets)
        for task in results.tasks
        for size, models in size_groups(results).items()
        for length in task.eval_lengths
    ]
    return Answers(results, budgets, found)


def decided_lengths(results: Results, task: TaskRecord, models: Sequence[str]) -> list[int]:
    """The training length, and the longest at which a model is above chance."""
    scores = {length: scores_at(results, task, length, models) for length in task.eval_lengths}
    if not scores[task.train_length]:
        return []
    above = [n for n, own in scores.items() if any(above_chance(task, v) for v in own.values())]
    return list(dict.fromkeys([task.train_length, max([task.train_length, *above])]))


def above_chance(task: TaskRecord, scores: Sequence[float]) -> bool:
    """Whether the median of scores is above the score of a guess.

    The margin is four standard errors of a guess, but at least 0.02; an unknown chance is 0.
    Losses, and scores that count no problems, are always above chance.
    """
    if not task.problems or not task.higher_is_better:
        return True
    guess = task.chance or 0.0
    error = (guess * (1 - guess) / task.problems) ** 0.5
    return middle(scores) > guess + max(0.02, 4 * error)


def scores_at(
    results: Results, task: TaskRecord, length: int, models: Sequence[str]
) -> dict[str, list[float]]:
    """The scores of each model; a model whose seeds all diverged has none."""
    found = scores_of(results, task, length, models)
    return {model: own for model, own in found.items() if not math.isnan(middle(own))}


def _answer(
    results: Results,
    task: TaskRecord,
    length: int,
    size: int | None,
    models: Sequence[str],
    budgets: Sequence[Budget],
) -> Answer:
    side = 1 if task.higher_is_better else -1
    scores = scores_of(results, task, length, models)

    def rank(model: str) -> float:
        value = side * middle(scores[model])
        return -math.inf if math.isnan(value) else value

    scores = {model: scores[model] for model in sorted(scores, key=rank, reverse=True)}
    runs = {model: runs_of(results, model, task) for model in models}
    steps = [r.steps for model in scores for r in scored_runs(results, model, task, length)]
    verdict = verdict_of(task, scores, looks=looks(results))
    choose = partial(_choose, results, task, length, scores, verdict)
    trials = [trial for trial in results.trials if trial.task == task.spec]
    return Answer(
        task=task,
        label=task_label(results, task) + (f", {short_number(size)}" if size else ""),
        size=size,
        length=length,
        models=models,
        scores=scores,
        verdict=verdict,
        solved={
            model: Share(sum(steps_to_solve(run, task) is not None for run in own), len(own))
            for model, own in runs.items()
            if own and task.solved_at is not None
        },
        updates=(min(steps, default=0), max(steps, default=0)),
        choice=choose(()),
        within=choose(budgets),
        seconds={
            model: sum(run.seconds for run in own)
            + sum(trial.seconds for trial in trials if trial.model == model)
            for model, own in runs.items()
        },
        looks=looks(results),
    )


def _choose(
    results: Results,
    task: TaskRecord,
    length: int,
    scores: Mapping[str, list[float]],
    verdict: Verdict,
    budgets: Sequence[Budget],
) -> Choice:
    """The model with the smallest state of those that are as good as the best."""
    order = [model for model, own in scores.items() if not math.isnan(middle(own))]
    allowed = [m for m in order if all(b.allows(results, m, length) for b in budgets)]
    if not allowed:
        return Choice(None, following=next(iter(order), None))
    at = length_at(results, STATE, length)

    def state(model: str) -> float:
        paid = cost_at(results, model, STATE, at)
        return math.inf if paid is None else paid.middle

    leader = allowed[0]
    close = CLOSE * (1.0 if task.problems else abs(middle(scores[leader])))
    equal = [m for m in allowed if abs(middle(scores[m]) - middle(scores[leader])) <= close]
    best = min((m for m in equal if (leader, m) not in verdict.better), key=state)
    others = [m for m in order if m != best]
    beyond = [m for m in others if m not in allowed and order.index(m) < order.index(best)]
    cheap = [m for m in others if state(m) <= CHEAPER * state(best)]
    rivals = tuple(m for m in allowed if m != best)
    alike = tuple(m for m in rivals if (best, m) not in verdict.better)
    more = partial(_seeds_to_tell, scores, verdict, kind_of(task))
    return Choice(
        model=best if above_chance(task, scores[best]) else None,
        best=best,
        following=next(iter(beyond or cheap or others), None),
        rivals=rivals,
        alike=alike,
        seeds=min(filter(None, map(partial(more, best), alike)), default=None),
    )


def _seeds_to_tell(
    scores: Mapping[str, list[float]], verdict: Verdict, kind: ScoreKind, first: str, second: str
) -> int | None:
    """How many seeds would tell two models apart; ``None`` if nothing is known about one."""
    if not {first, second} <= {*verdict.order}:
        return None
    return seeds_to_tell(scores[first], scores[second], kind, len(verdict.pairs))
