"""Which models are clearly better than others, judged by the spread over their seeds.

Every pair of models is compared by Student's t-test of the difference of their mean scores. The
error rate over all pairs is held at :data:`ERROR_RATE` (Bonferroni: each pair gets its share). The
standard deviation over seeds is never taken to be smaller than the sampling error of one score, so
that a few seeds that agree by chance do not decide.

The test assumes scores that spread evenly around their mean. A model that solves a task from half
of its seeds does not: two such models end three seeds to none in 3 percent of comparisons with
three seeds, and five to none in 0.2 percent of those with five.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

ERROR_RATE = 0.002
"""Probability that a pair of equal models is told apart, over all pairs of a task."""


class Verdict(NamedTuple):
    """The outcome of a comparison of scores.

    Attributes:
        groups: Models from best to worst. In each group, no model is clearly worse than the first.
        better: Pairs of models of which the first is clearly better than the second.
        undecidable: Models that have no spread (fewer than two seeds) or a seed without a score;
            nothing is claimed of them.
    """

    groups: list[list[str]]
    better: set[tuple[str, str]]
    undecidable: list[str]

    @property
    def winner(self) -> str | None:
        """The one model that is clearly better than every other; ``None`` if there is none."""
        models = [model for group in self.groups for model in group] + self.undecidable
        beaten = len(models) - 1
        wins = (m for m in models if sum(first == m for first, _ in self.better) == beaten)
        return next(wins, None) if beaten else None


def judge(
    scores: Mapping[str, Sequence[float | None]], *, higher_is_better: bool, problems: int = 0
) -> Verdict:
    """Judge models by their scores.

    Args:
        scores: One score per seed, by model; ``None`` or NaN where training diverged.
        higher_is_better: Whether a larger score is better.
        problems: Number of answers behind each score, if a score is the share that is right; its
            sampling error is then sqrt(p (1 - p) / problems), p being the mean of the seeds.

    Returns:
        Groups of models, best first, and the pairs that are told apart.

    Example:
        >>> verdict = judge({"a": [0.9, 0.91, 0.92], "b": [0.2, 0.21, 0.2]}, higher_is_better=True)
        >>> verdict.groups, verdict.winner
        ([['a'], ['b']], 'a')
    """
    usable = {
        model: [float(value) for value in own if value is not None and math.isfinite(value)]
        for model, own in scores.items()
    }
    known = [m for m in scores if len(usable[m]) == len(scores[m]) >= 2]
    known.sort(key=lambda model: fmean(usable[model]), reverse=higher_is_better)
    pairs = list(combinations(known, 2))
    better = {
        (first, second)
        for first, second in pairs
        if _chance(usable[first], usable[second], problems) * len(pairs) < ERROR_RATE
    }
    groups: list[list[str]] = []
    for model in known:
        if groups and (groups[-1][0], model) not in better:
            groups[-1].append(model)
        else:
            groups.append([model])
    return Verdict(groups, better, [model for model in scores if model not in known])


def _chance(first: Sequence[float], second: Sequence[float], problems: int) -> float:
    """Probability of such a difference of means, or a larger one, between equal models."""
    difference = abs(fmean(first) - fmean(second))
    free = [len(own) - 1 for own in (first, second)]
    squares = [_deviation(own, problems) ** 2 for own in (first, second)]
    pooled = sum(n * square for n, square in zip(free, squares, strict=True)) / sum(free)
    error = math.sqrt(pooled * (1 / len(first) + 1 / len(second)))
    if difference == 0 or error == 0:
        return 1.0 if difference == 0 else 0.0
    return _two_sided(difference / error, sum(free))


def _deviation(scores: Sequence[float], problems: int) -> float:
    """Standard deviation over seeds, but at least the sampling error of one score."""
    floor = 0.0
    if problems:
        share = (fmean(scores) * problems + 1) / (problems + 2)  # an error even at 0 and 1
        floor = math.sqrt(max(0.0, share * (1 - share)) / problems)
    return max(stdev(scores), floor)


def _two_sided(t: float, freedom: int) -> float:
    """Probability that Student's t is at least as far from 0.

    With t = sqrt(freedom) tan(a), the density of a is proportional to cos(a)^(freedom - 1).
    """
    edges = np.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, 501)
    middles, width = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
    beyond = float((np.cos(middles) ** (freedom - 1)).sum() * width)
    log_whole = math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2) + math.log(math.pi) / 2
    return 2 * beyond / math.exp(log_whole)
