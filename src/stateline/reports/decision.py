"""The decision that a comparison allows: the best model within a budget, and how sure that is.

Models are scored at the training length, and at the longest length at which any is above chance.
"""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from stateline.errors import InputError
from stateline.reports.costs import FLOPS, STATE, Cost, Measured, common_lengths, speed
from stateline.reports.format import DASH, count, listing, short_bytes, short_number, words
from stateline.reports.records import (
    judged,
    middle,
    runs_of,
    score,
    scores_of,
    solved_runs,
    task_label,
)
from stateline.reports.sentences import size_groups
from stateline.runs.results import Results, RunRecord, TaskRecord
from stateline.runs.verdict import Verdict

COSTS = {
    "state": STATE,
    "flops": FLOPS,
    "decode": speed("decode"),
    "prefill": speed("prefill"),
    "train": speed("train"),
}
"""Costs that a budget may limit, by name."""

CLOSE = 0.01
"""Scores count as equal within this share of the range or of the best score; cost then decides."""

CHOSEN = (
    f"Of the models whose scores are at most {CLOSE:g} (losses: {CLOSE:.0%}) behind the best one, "
    "and not clearly worse, the one with the smallest state is chosen."
)
"""How the best model of a decision is chosen, for readers."""

CHEAPER = 0.5
"""Largest state of the next choice, relative to the best model's, if any model is that small."""

NAMED = 3
"""Largest number of models that are named as not told apart; more are counted."""

FIT_POINTS = 4
"""Fewest points in the second half of a curve that are fitted."""

_BUDGET = re.compile(
    r"(?P<name>[a-z]+)(@(?P<length>\d+))?(?P<side><=|>=)(?P<number>[\d.]+) ?(?P<unit>[a-zA-Z]*)"
)
_UNITS = {"": 1, "b": 1, "k": 1e3, "m": 1e6, "g": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class Budget(NamedTuple):
    """A limit on a cost.

    Attributes:
        text: As it was given.
        cost: What is limited.
        length: The length of the limited cost; ``None``: the longest at which all models have it.
        bound: The limit: the most, or for a speed the least.
    """

    text: str
    cost: Cost
    length: int | None
    bound: float

    def allows(self, results: Results, model: str) -> bool:
        """Whether a model is within the limit; without a measured cost it is not."""
        paid = cost_at(results, model, self.cost, self.length)
        if paid is None:
            return False
        higher = self.cost.higher_is_better
        return paid.middle >= self.bound if higher else paid.middle <= self.bound

    def measured(self, results: Results) -> bool:
        """Whether any model has this cost at this length."""
        return any(cost_at(results, r.model, self.cost, self.length) for r in results.speed)


def read_budget(text: str) -> Budget:
    """A limit such as ``state<=64KiB``, ``decode>=1k`` or ``state@4096<=64KiB``.

    Raises:
        InputError: If it is malformed, or does not limit a speed from below, or others from above.
    """
    found = _BUDGET.fullmatch(text.replace(" ", ""))
    cost = COSTS.get(found["name"]) if found else None
    unit = _UNITS.get(found["unit"].lower()) if found else None
    try:
        bound = float(found["number"]) * unit if found and unit else None
    except ValueError:
        bound = None
    if found is None or cost is None or bound is None:
        raise InputError(
            f"a budget must limit {', '.join(COSTS)}, such as state<=64KiB, decode>=1k or, at one "
            f"length, state@4096<=64KiB, got {text!r:.60}"
        )
    if cost.higher_is_better != (found["side"] == ">="):
        side = ">=" if cost.higher_is_better else "<="
        raise InputError(f"a budget of {found['name']} needs {side}, got {text!r:.60}")
    return Budget(text, cost, int(found["length"]) if found["length"] else None, bound)


class Decision(NamedTuple):
    """A row of the table of decisions.

    Attributes:
        task: Name of the task, with the size of the models if there are several.
        length: Length of the sequences.
        best: The model; empty if none is within the budget.
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


def question(results: Results, budgets: Sequence[Budget]) -> str:
    """What the decisions answer."""
    within = listing([budget.text for budget in budgets])
    return ("Which one" if len(results.models) > 1 else "Result") + (
        within and f", within {within}"
    )


def decisions(results: Results, budgets: Sequence[Budget] = ()) -> list[Decision]:
    """For each task, size and length the best model within the budgets."""
    return [
        _decide(results, task, length, label, models, budgets)
        for task in results.tasks
        for size, models in size_groups(results).items()
        for label in [task_label(results, task) + (f", {short_number(size)}" if size else "")]
        for length in decided_lengths(results, task, models)
    ]


def decided_lengths(results: Results, task: TaskRecord, models: Sequence[str]) -> list[int]:
    """The training length, and the longest at which a model is above chance."""
    scores = {length: _scores(results, task, length, models) for length in task.eval_lengths}
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


def cost_at(results: Results, model: str, cost: Cost, length: int | None = None) -> Measured | None:
    """A cost of a model at a length, by default at the longest at which all models have it."""
    entry = next((entry for entry in results.speed if entry.model == model), None)
    lengths = common_lengths(results, cost)
    if entry is None or not lengths:
        return None
    return cost.values(entry).get(lengths[-1] if length is None else length)


def _scores(
    results: Results, task: TaskRecord, length: int, models: Sequence[str]
) -> dict[str, list[float]]:
    """The scores of each model; a model whose seeds all diverged has none."""
    found = scores_of(results, task, length, models)
    return {model: own for model, own in found.items() if not math.isnan(middle(own))}


def _decide(
    results: Results,
    task: TaskRecord,
    length: int,
    label: str,
    models: Sequence[str],
    budgets: Sequence[Budget],
) -> Decision:
    scores = _scores(results, task, length, models)
    judge = partial(judged, results, task, length)
    better = judge(scores).better
    side = 1 if task.higher_is_better else -1
    order = sorted(scores, key=lambda model: side * middle(scores[model]), reverse=True)
    allowed = [m for m in order if all(b.allows(results, m) for b in budgets)]
    at = f"{length:,}" + (" (trained)" if length == task.train_length else "")
    if not allowed:
        first = f"without it {_offer(results, task, scores, order[0])}"
        unknown = next((b for b in budgets if not b.measured(results)), None)
        why = "no model is within the budget"
        if unknown:
            lengths = [f"{n:,}" for n in common_lengths(results, unknown.cost)]
            known = f", only at {', '.join(lengths)}" if lengths else ""
            why = f"no model was measured for {unknown.text}{known}"
        return Decision(label, at, "", DASH, DASH, why, first)

    def state(model: str) -> float:
        paid = cost_at(results, model, STATE)
        return math.inf if paid is None else paid.middle

    leader = allowed[0]
    close = CLOSE * (1.0 if task.problems else abs(middle(scores[leader])))
    equal = [m for m in allowed if abs(middle(scores[m]) - middle(scores[leader])) <= close]
    best = min((m for m in equal if (leader, m) not in better), key=state)
    others = [m for m in order if m != best]
    beyond = [m for m in others if m not in allowed and order.index(m) < order.index(best)]
    cheap = [m for m in others if state(m) <= CHEAPER * state(best)]
    following = next(iter(beyond or cheap or others), None)
    sure, alike = count(len(scores[best]), "seed"), ""
    if len(allowed) > 1:
        sure, alike = _sure(scores, best, [m for m in allowed if m != best], judge)
    elif len(order) > 1:
        sure = f"no other is within the budget ({sure})"
    elif len(models) > 1:
        sure = f"no other has a score here ({sure})"
    if not above_chance(task, scores[best]):
        sure, alike = "no better than a guess", ""
    return Decision(
        label,
        at,
        best,
        f"{middle(scores[best]):.3f} {words(task.metric)}{_share(results, task, best, scores)}",
        _costs(results, best),
        sure,
        "" if following is None else _offer(results, task, scores, following, best),
        alike,
    )


def _sure(
    scores: Mapping[str, list[float]],
    best: str,
    others: Sequence[str],
    judge: Callable[[Mapping[str, list[float]]], Verdict],
) -> tuple[str, str]:
    """How sure a choice is, and the names of the models that this counts.

    More seeds are asked for if further models would be clearly worse with two or three times the
    seeds of the same spread.
    """
    seeds = count(len(scores[best]), "seed")
    if min(len(scores[best]), max(len(scores[model]) for model in others)) < 2:
        return "one seed: not decided", ""
    same = _alike(judge(scores), best, others)
    if not same:
        return f"clearly best ({seeds})", ""
    several = {model: own for model, own in scores.items() if len(own) > 1}
    for times in (2, 3):
        found = judge({model: times * own for model, own in several.items()})
        if len(_alike(found, best, others)) < len(same):
            seeds += f"; {times * len(scores[best])} may tell more apart"
            break
    names = listing([f"“{model}”" for model in same])
    if len(same) <= NAMED:
        return f"not told apart from {names} ({seeds})", ""
    every = len(same) == len(others)
    number = "any" if every else len(same)
    said = f"not told apart from {number} of the {len(others)} others ({seeds})"
    return said, "" if every else names


def _alike(found: Verdict, best: str, others: Sequence[str]) -> list[str]:
    return [model for model in others if (best, model) not in found.better]


def _costs(results: Results, model: str) -> str:
    state, decode = (cost_at(results, model, COSTS[name]) for name in ("state", "decode"))
    told = [DASH if state is None else short_bytes(state.middle)]
    told += [] if decode is None else [f"{short_number(decode.middle)} tok/s"]
    return ", ".join(told)


def _share(
    results: Results, task: TaskRecord, model: str, scores: Mapping[str, list[float]]
) -> str:
    """How many seeds of a model a score stands for, if not for all."""
    seeds = len(runs_of(results, model, task))
    scored = sum(not math.isnan(value) for value in scores[model])
    return f", {scored} of {seeds} seeds" if scored < seeds else ""


def _offer(
    results: Results,
    task: TaskRecord,
    scores: Mapping[str, list[float]],
    model: str,
    best: str = "",
) -> str:
    """A model with its score, the difference to the best model's score, and its costs."""
    value = middle(scores[model])
    told = ""
    if best:
        gain = round(value, 3) - round(middle(scores[best]), 3)  # of the numbers that are shown
        gain *= 1 if task.higher_is_better else -1
        size = f"{abs(gain):.3f}"
        told = f" ({size} {'better' if gain > 0 else 'worse'})" if float(size) else " (equal)"
    share = _share(results, task, model, scores)
    return f"“{model}” {value:.3f}{told}{share}, {_costs(results, model)}"


def outlook(results: Results, task: TaskRecord) -> list[str]:
    """Advice on longer training: models at chance, and curves that still rise.

    The score of each seed is fitted by a line in the logarithm of the steps, over the second half
    of its curve. It is rising if the slope is more than two standard errors, and more than
    :data:`CLOSE` for twice the steps.
    """
    runs = {model: runs_of(results, model, task) for model in results.models}
    runs = {model: own for model, own in runs.items() if own}
    if not runs:
        return []
    said = []
    scores = _scores(results, task, task.train_length, list(runs))
    if scores and not any(above_chance(task, own) for own in scores.values()):
        guess = "" if task.chance is None else f" (which has {task.chance:.3f})"
        none = "no model is" if len(results.models) > 1 else "the model is no"
        said.append(f"{none} better than a guess{guess}: the scores say nothing yet.")
    open_ = {
        m: own for m, own in runs.items() if task.solved_at is None or not solved_runs(own, task)
    }
    rising = {m: more for m, own in open_.items() if (more := _steps_asked(own, task))}
    if rising:
        told = _rising(rising, task)
        order = ", so more steps may change the order" if len(results.models) > 1 else ""
        said.append(f"still improving when training ended{order}: {told}.")
    elif said:
        fitted = all(_late(run) for own in open_.values() for run in own)
        flat = "no curve has begun to improve: " if fitted else ""
        said.append(f"{flat}try more steps or other learning rates.")
    return said + _unbeaten(results, task)


def _unbeaten(results: Results, task: TaskRecord) -> list[str]:
    """The baselines that no model beats at any length, in a sentence."""
    side = 1 if task.higher_is_better else -1
    lengths = [_scores(results, task, length, results.models) for length in task.eval_lengths]
    best = max((side * middle(own) for scores in lengths for own in scores.values()), default=None)
    if best is None:
        return []
    found = [f"{n} ({v:.3f})" for n, v in task.baselines.items() if side * v >= best]
    none = "no model is" if len(results.models) > 1 else "the model is not"
    return [f"{none} better than {listing(found)}."] if found else []


def _rising(asked: Mapping[str, float], task: TaskRecord) -> str:
    """The models whose curves rise, and whether a goal is as near as the part that was fitted.

    The fit is made over a doubling of the steps, so it says little of what is further.
    """
    near = listing([f"“{model}”" for model, steps in asked.items() if steps <= 1])
    far = listing([f"“{model}”" for model, steps in asked.items() if steps > 1])
    if task.solved_at is None:
        return far
    said = [f"{near} may solve it within twice the steps"] if near else []
    return "; ".join([*said, f"{far} may need more than twice the steps"] if far else said)


def _steps_asked(runs: Sequence[RunRecord], task: TaskRecord) -> float | None:
    """Median of :func:`_asked`; ``None`` if most curves do not rise.

    Seeds that solved the task, or diverged in the end, are left out.
    """
    short = [run for run in runs if _missing(run, task) > 0]
    asked = [found for run in short if (found := _asked(run, task)) is not None]
    if 2 * len(asked) <= len(short):
        return None
    return statistics.median_low(asked)


def _missing(run: RunRecord, task: TaskRecord) -> float:
    """Distance of a score to the goal, infinite without a goal; NaN if the run diverged."""
    if task.solved_at is None:
        return math.inf
    distance = task.solved_at - score(run, task, task.train_length)
    return distance if task.higher_is_better else -distance


def _late(run: RunRecord) -> list[tuple[float, float]]:
    """Logarithms of the steps in the second half of a curve, and scores; empty if too few."""
    curve = [(p.step, p.metric) for p in run.curve if p.metric is not None and p.step > 0]
    late = [(math.log(step), own) for step, own in curve if 2 * step >= run.steps]
    return late if len({x for x, _ in late}) >= FIT_POINTS else []


def _asked(run: RunRecord, task: TaskRecord) -> float | None:
    """Further steps until the fitted curve reaches the goal, relative to the steps done.

    ``None`` if the curve does not rise, or has too few points.
    """
    late = _late(run)
    if not late:
        return None
    side = 1 if task.higher_is_better else -1
    x, y = [x for x, _ in late], [side * own for _, own in late]
    slope, intercept = statistics.linear_regression(x, y)
    squares = sum((b - slope * a - intercept) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(squares / (len(x) - 2) / ((len(x) - 1) * statistics.variance(x)))
    enough = CLOSE if task.problems else CLOSE * abs(y[-1])
    if slope <= 2 * error or slope * math.log(2) <= enough:
        return None
    return math.expm1(min(50.0, _missing(run, task) / slope))
