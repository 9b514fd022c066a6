"""The answers of a comparison as rows of text: which model to take, at which cost, how surely."""

import math
from typing import NamedTuple

from stateline.reports.answers import CLOSE, Answer, Answers, Choice
from stateline.reports.budgets import COSTS, cost_at, length_at
from stateline.reports.costs import STATE, best_costs, common_lengths
from stateline.reports.format import DASH, count, listing, quoted, short_bytes, short_number, words
from stateline.reports.records import middle
from stateline.runs.judged import kind_of
from stateline.runs.results import Results

CHOSEN = (
    f"Of the models whose scores are at most {CLOSE:g} (losses: {CLOSE:.0%}) behind the best one, "
    "and not clearly worse, the one with the smallest state is chosen."
)
"""How the best model of a decision is chosen, for readers."""

NAMED = 3
"""Largest number of models that are named as not told apart; more are counted."""


class Decision(NamedTuple):
    """A row of the table of decisions.

    Attributes:
        task: Name of the task, with the size of the models if there are several.
        length: Length of the sequences.
        best: The model; empty if none is within the budget, or the best one only guesses.
        score: Its score.
        costs: Its state, and its speed of decoding.
        sure: How sure the choice is.
        following: The next choice, with its gain in cost and its loss in score.
        alike: The models that ``sure`` counts as not told apart; empty if it tells them.
    """

    task: str
    length: str
    best: str
    score: str
    costs: str
    sure: str
    following: str
    alike: str = ""


HEADINGS = ("task", "length", "best", "score", "state, decoding", "how sure", "next choice")


def headings(results: Results) -> tuple[str, ...]:
    """The headings of the decisions; a single model is no choice."""
    if len(results.models) > 1:
        return HEADINGS
    return *HEADINGS[:2], "model", *HEADINGS[3:-1]


def question(found: Answers) -> str:
    """What the decisions answer."""
    within = listing([budget.text for budget in found.budgets])
    return ("Which one" if len(found.results.models) > 1 else "Result") + (
        within and f", within {within}"
    )


def decisions(found: Answers) -> list[Decision]:
    """For each task, size and length the best model within the budgets."""
    return [_Row(found, answer).decision() for answer in found.decided()]


def solvers(answer: Answer) -> str:
    """Who solved a task; or that none did, with the best model and its distance from a guess.

    Empty for a task that is never solved, and before its first run.
    """
    solved = {model: own for model, own in answer.solved.items() if own.good}
    if solved:
        with_all = [m for m, own in solved.items() if own.good == own.seeds]
        told = [f"{quoted(with_all)} with every seed"] if with_all else []
        told += [
            f"“{m}” with {own.good} of {count(own.seeds, 'seed')}"
            for m, own in solved.items()
            if own.good < own.seeds
        ]
        return f"Solved by {listing(told)}."
    best, task = answer.choice.best, answer.task
    if best is None or not answer.solved:
        return ""
    value = middle(answer.scores[best])
    far = ""
    if task.chance is not None:
        gain = round(value, 3) - round(task.chance, 3)
        far = f", {abs(gain):.3f} {'above' if gain >= 0 else 'below'} a guess"
    leader = f"“{best}” has" if len(answer.models) == 1 else f"the best, “{best}”, has"
    goal = f"{task.solved_at:g} {words(task.metric)}"
    return f"Not solved ({goal}): {leader} {value:.3f}{far}."


def fastest_solvers(found: Answers) -> list[str]:
    """For each task and size, which of several models decodes fastest that mostly solved it."""
    told = [(own, _fastest(found.results, own)) for own in found.every if not own.beyond]
    return [
        f"{own.label}: of the models that solved it with more than half of their seeds {said}"
        for own, said in told
        if said
    ]


def _fastest(results: Results, answer: Answer) -> str:
    """Which of the models that solved a task decodes fastest, at the longest length measured."""
    cost = COSTS["decode"]
    solved = [model for model, own in answer.solved.items() if own.part > 1 / 2]
    lengths = common_lengths(results, cost)
    if len(solved) < 2 or not lengths:
        return ""
    known = {m: paid for m in solved if (paid := cost_at(results, m, cost, lengths[-1]))}
    best = max(known, key=lambda model: known[model].middle)
    same = [model for model in best_costs(known, cost) or known if model != best]
    beside = f" (no clear difference to {quoted(same)})" if same else ""
    number = short_number(known[best].middle)
    return f"“{best}” decodes fastest{beside}: {number} tok/s at {lengths[-1]:,} tokens."


def elsewhere(found: Answers) -> list[str]:
    """What each model that is chosen for a task scores on the others, beside the best one there."""
    longest = {own.label: own for own in found.decided()}  # a later one is longer
    said = []
    for model in dict.fromkeys(own.within.model for own in found.decided() if own.within.model):
        parts = [
            f"{own.label} at {own.length:,} {_value(own, model):.3f} ({worse} than “{best}”)"
            for own in longest.values()
            if (best := own.choice.best) and (worse := _gain(own, model, best))
        ]
        said += [f"“{model}” elsewhere: {'; '.join(parts)}."] if parts else []
    return said if len(found.results.tasks) > 1 else []


def _value(answer: Answer, model: str) -> float:
    """The median score of a model; NaN if it has none."""
    return middle(answer.scores.get(model, ()))


def _gain(answer: Answer, model: str, other: str) -> str:
    """How much better or worse a score is than another; empty if it shows the same, or is none."""
    gain = round(_value(answer, model), 3) - round(_value(answer, other), 3)
    gain = 0.0 if math.isnan(gain) else gain
    gain *= 1 if answer.task.higher_is_better else -1
    size = f"{abs(gain):.3f}"  # of the numbers that are shown
    return f"{size} {'better' if gain > 0 else 'worse'}" if float(size) else ""


def unequal(answer: Answer) -> str:
    """That models had different numbers of updates, where that matters; else empty.

    A task that was solved may end training; beyond its length, longer training may tell.
    """
    low, high = answer.updates
    if not answer.beyond or low == high or len(answer.scores) < 2:
        return ""
    return f"unequal training: {low:,} to {high:,} updates"


class _Row(NamedTuple):
    """The texts of one answer."""

    found: Answers
    answer: Answer

    @property
    def choice(self) -> Choice:
        return self.answer.within

    def decision(self) -> Decision:
        """The row."""
        answer, choice = self.answer, self.choice
        at = f"{answer.length:,}" + ("" if answer.beyond else " (trained)")
        following = "" if choice.following is None else self.offer(choice.following)
        if choice.model is None:
            sure = self.why_none()
            return Decision(answer.label, at, "", DASH, DASH, sure, following)
        sure, alike = self.sure(choice.model)
        return Decision(
            *(answer.label, at, choice.model, self.score(choice.model)),
            *(self.costs(choice.model), sure, following, alike),
        )

    def why_none(self) -> str:
        """Why no model is named: it would be over the budget, or a guess."""
        results, answer, best = self.found.results, self.answer, self.choice.best
        if best is not None:
            chance = answer.task.chance
            guess = "" if chance is None else f", a guess {chance:.3f}"
            none = "no model" if len(answer.models) > 1 else "the model"
            how = "is" if none == "no model" else "is no"
            within = " within the budget" if self.found.budgets else ""
            best = f"“{best}” has {middle(answer.scores[best]):.3f}"
            return f"{none}{within} {how} better than a guess: {best}{guess}"
        unknown = [b for b in self.found.budgets if not b.measured(results, answer.length)]
        if not unknown:
            return "no model is within the budget"
        lengths = [f"{n:,}" for n in common_lengths(results, unknown[0].cost)]
        known = f", only at {', '.join(lengths)}" if lengths else ""
        return f"no model was measured for {unknown[0].text}{known}"

    def score(self, model: str) -> str:
        """A score, with what it does not say by itself."""
        answer, task = self.answer, self.answer.task
        value = middle(answer.scores[model])
        told = [f"{value:.3f} {words(task.metric)}", *self.share(model)]
        kind = kind_of(task)
        told += ["not solved"] if task.solved_at and not kind.solved([value]) else []
        return ", ".join([*told, *filter(None, [unequal(answer)])])

    def share(self, model: str) -> list[str]:
        """How many seeds of a model a score stands for, if not for all."""
        scored = sum(not math.isnan(value) for value in self.answer.scores[model])
        runs = self.found.results.runs
        seeds = sum(r.model == model and r.task == self.answer.task.spec for r in runs)
        return [f"{scored} of {seeds} seeds"] if scored < seeds else []

    def sure(self, best: str) -> tuple[str, str]:
        """How sure a choice is, and the names of the models that this counts."""
        answer, choice = self.answer, self.choice
        seeds = count(len(answer.scores[best]), "seed")
        if not choice.rivals:
            if len(answer.models) == 1:
                return seeds, ""
            scored = sum(not math.isnan(middle(own)) for own in answer.scores.values())
            why = "is within the budget" if scored > 1 else "has a score here"
            return f"no other {why} ({seeds})", ""
        most = max(len(answer.scores[model]) for model in choice.rivals)
        if min(len(answer.scores[best]), most) < 2:
            return "one seed: not decided", ""
        if not choice.alike:
            place = " within the budget" if self.found.budgets else ""
            return f"clearly best{place} ({seeds})", ""
        if choice.seeds:
            seeds += f"; try {choice.seeds}"
        names = quoted(choice.alike)
        if len(choice.alike) <= NAMED:
            return f"not told apart from {names} ({seeds})", ""
        every = len(choice.alike) == len(choice.rivals)
        number = "any" if every else len(choice.alike)
        said = f"not told apart from {number} of the {len(choice.rivals)} others ({seeds})"
        return said, "" if every else names

    def costs(self, model: str) -> str:
        """The state at the scored length and at the longest, and the speed of decoding."""
        results = self.found.results
        told: list[str] = []
        at = length_at(results, STATE, self.answer.length)
        longest = max(common_lengths(results, STATE), default=None)
        paid, most = (cost_at(results, model, STATE, n) for n in (at, longest))
        if paid and most and paid.middle == most.middle:
            told.append(f"{short_bytes(paid.middle)} to {longest:,} tokens")
        elif paid and most:
            told.append(f"{short_bytes(paid.middle)} at {at:,} tokens")
            told.append(f"{short_bytes(most.middle)} at {longest:,} tokens")
        at = length_at(results, COSTS["decode"], self.answer.length)
        decode = cost_at(results, model, COSTS["decode"], at)
        if decode is not None:
            told.append(f"{short_number(decode.middle)} tok/s at {at:,}")
        return ", ".join(told) or DASH

    def offer(self, model: str) -> str:
        """A model with its score, the difference to the best model's score, and its costs."""
        best, value = self.choice.best, _value(self.answer, model)
        told = "" if best is None else f" ({_gain(self.answer, model, best) or 'equal'})"
        outside = best is None or model not in (best, *self.choice.rivals)
        place = "beyond the budget: " if self.found.budgets and outside else ""
        parts = [f"{place}“{model}” {value:.3f}{told}", *self.share(model), self.costs(model)]
        return ", ".join(parts)
