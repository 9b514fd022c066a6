"""Advice on longer training: models at chance, and curves that still rise."""

import math
import statistics
from collections.abc import Mapping, Sequence

from stateline.reports.answers import CLOSE, above_chance, scores_at
from stateline.reports.format import listing
from stateline.reports.records import middle, runs_of, solved_runs
from stateline.runs.judged import score
from stateline.runs.results import Results, RunRecord, TaskRecord

FIT_POINTS = 4
"""Fewest points in the second half of a curve that are fitted."""


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
    scores = scores_at(results, task, task.train_length, list(runs))
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
    lengths = [scores_at(results, task, length, results.models) for length in task.eval_lengths]
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
