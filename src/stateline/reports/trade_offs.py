"""Scores of models against their costs: state bytes, FLOPs and measured speed."""

from stateline.charts.chart import Chart
from stateline.charts.scatter import Spot, front, trade_off_chart
from stateline.reports.answers import decided_lengths
from stateline.reports.axes import cost_axis, score_axis
from stateline.reports.budgets import cost_at, length_at
from stateline.reports.costs import FLOPS, STATE, Cost, speed
from stateline.reports.format import listing, words
from stateline.reports.records import drawn_models, middle, runs_of, scores_of, task_label
from stateline.runs.folder import slug
from stateline.runs.results import Results, TaskRecord

COSTS = (STATE, FLOPS, speed("decode"))

FRONT = (
    "Dashed: the Pareto front of the medians; no other model is better in one and at least as good "
    "in the other."
)
"""The note below every chart."""

BARS = "Bars: lowest to highest seed, and the spread of a speed over its rounds."
"""The note below charts that have bars."""


def trade_off_charts(results: Results, task: TaskRecord, name: str) -> list[Chart]:
    """Charts of the models' scores against each cost, at the longest length of the decision.

    Args:
        results: Results with costs; without any there are no charts.
        task: The task.
        name: Beginning of the names of the charts.
    """
    drawn = [_chart(results, task, cost, name) for cost in COSTS]
    return [chart for chart in drawn if chart is not None]


def _chart(results: Results, task: TaskRecord, cost: Cost, name: str) -> Chart | None:
    """A chart of at least two models; ``None`` if there are fewer."""
    *_, scored = decided_lengths(results, task, results.models) or [task.train_length]
    length = length_at(results, cost, scored)
    if length is None:
        return None
    spots = _spots(results, task, cost, length, scored)
    if len(spots) < 2:
        return None
    best = front(spots, less_cost=not cost.higher_is_better, more_score=task.higher_is_better)
    metric = words(task.metric)
    named = listing([f"“{spot.model.name}”" for spot in best])
    bars = any(spot.low < spot.high or spot.costs[1] < spot.costs[2] for spot in spots)
    notes = [FRONT, *([BARS] if bars else []), f"On the front: {named}."]
    left_out = [m for m in results.models if m not in {spot.model.name for spot in spots}]
    if missing := [m for m in left_out if runs_of(results, m, task)]:
        notes.append(f"Without a score or a cost: {listing([f'“{m}”' for m in missing])}.")
    return trade_off_chart(
        f"{name}-against-{slug(cost.title)}".lower(),
        f"{task_label(results, task)}: {metric} against "
        f"{cost.title.lower() if cost is not FLOPS else cost.title}",
        notes,
        spots,
        best,
        (
            cost_axis(
                cost, [c for s in spots for c in s.costs], f"{cost.unit}, at {length:,} tokens"
            ),
            score_axis(task, f"{metric} at length {scored}"),
        ),
        less_cost=not cost.higher_is_better,
    )


def _spots(results: Results, task: TaskRecord, cost: Cost, length: int, scored: int) -> list[Spot]:
    """The models that have both a score and a cost."""
    look, spots = drawn_models(results), []
    for model, scores in scores_of(results, task, scored, results.models).items():
        finite, paid = [s for s in scores if s == s], cost_at(results, model, cost, length)
        if finite and paid is not None and paid.low > 0:
            spots.append(Spot(look[model], paid, middle(finite), min(finite), max(finite)))
    return spots
