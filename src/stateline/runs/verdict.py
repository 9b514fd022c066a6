"""Which models are clearly better than others, judged by the spread over their seeds.

Every pair of models is compared by Student's t-test of the difference of their mean scores. The
error rate over all pairs is held at :data:`ERROR_RATE` (Bonferroni: each pair gets its share). The
standard deviation over seeds is never taken to be smaller than the sampling error of one score, so
that a few seeds that agree by chance do not decide.

The t-test assumes scores that spread evenly around their mean. Where the seeds of some model fall
into two kinds, models of different kinds are compared by their shares of seeds of the better kind,
by Barnard's exact test. Two kinds are seeds that solve a task and seeds that do not, or seeds on
either side of a wide gap between scores; among the scores of one kind, there may be two kinds
again. If no seed shows that there are two kinds, as when all seeds of one model are of the
better kind and all of another are not, equal models are told apart by luck: of two models with n
seeds each, in at most 2 / 4^n of comparisons (12 % for two seeds, 3 % for three), and more rarely
if there are more models.

**One may look after every seed** if the number of looks is fixed before (:func:`judge` with
``looks``). A pair is then told apart if the test at one of the looks tells it apart; each look
gets its share of :data:`SEQUENTIAL_RATE`. Only the first n seeds of both count at look n, so the
rate holds for any choice of the models that get more seeds.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, pairwise
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

ERROR_RATE = 0.002
"""Probability that a pair of equal models is told apart, over all pairs of a task."""

SEQUENTIAL_RATE = 0.05
"""The same if seeds are added until models are told apart: over all pairs and all looks."""

FIRST_LOOK = 3
"""Seeds of each model at the first look."""

SPLIT = 0.1
"""Smallest distance between solving and other seeds for which they count as two kinds, relative to
the score that counts as solved."""

WIDE = 2
"""How many times as wide as any other gap between scores the gaps between kinds are."""

MOST_KINDS = 4
"""Largest number of kinds that are looked for at a time."""


class Verdict(NamedTuple):
    """The outcome of a comparison of scores.

    Attributes:
        groups: Models from best to worst. In each group, no model is clearly worse than the first.
        better: Pairs of models of which the first is clearly better than the second.
        undecidable: Models that have no spread (fewer than two seeds) or a seed without a score;
            nothing is claimed about them.
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


class Kind(NamedTuple):
    """What scores are.

    Attributes:
        higher_is_better: Whether a larger score is better.
        problems: Number of answers behind each score, if a score is the share that is right; its
            sampling error is then sqrt(p (1 - p) / problems), where p is the mean over the seeds.
        solved_at: Score at which a seed has solved the task; ``None`` if there is none.
    """

    higher_is_better: bool
    problems: int = 0
    solved_at: float | None = None

    def solved(self, scores: Sequence[float]) -> list[float]:
        """The scores of seeds that have solved the task."""
        goal = self.solved_at
        if goal is None:
            return []
        return [own for own in scores if (own >= goal if self.higher_is_better else own <= goal)]

    def split(self, scores: Sequence[float]) -> bool:
        """Whether some seeds have solved the task and others are far from it."""
        solved = self.solved(scores)
        others = [own for own in scores if own not in solved]
        if not solved or not others:
            return False
        gap = max(min(solved) - max(others), min(others) - max(solved))
        return gap > SPLIT * abs(self.solved_at or 0.0)


def judge(scores: Mapping[str, Sequence[float | None]], kind: Kind, *, looks: int = 1) -> Verdict:
    """Judge models by their scores.

    Args:
        scores: One score per seed, in the order of the seeds, by model; ``None`` or NaN where
            training diverged.
        kind: What the scores are.
        looks: Number of looks that were allowed, the first after :data:`FIRST_LOOK` seeds; 1 for a
            number of seeds that was fixed before.

    Returns:
        Groups of models, best first, and the pairs that are told apart.

    Example:
        >>> verdict = judge({"a": [0.9, 0.91, 0.92], "b": [0.2, 0.21, 0.2]}, Kind(True))
        >>> verdict.groups, verdict.winner
        ([['a'], ['b']], 'a')
    """
    usable = {
        model: [float(value) for value in own if value is not None and math.isfinite(value)]
        for model, own in scores.items()
    }
    known = [m for m in scores if len(usable[m]) == len(scores[m]) >= 2]
    cuts = _cuts([usable[model] for model in known], kind)

    def rank(model: str) -> tuple[float, ...]:
        own, side = usable[model], 1 if kind.higher_is_better else -1
        return *(len(cut.solved(own)) / len(own) for cut in cuts), side * fmean(own)

    known.sort(key=rank, reverse=True)
    pairs = list(combinations(known, 2))
    rate = (ERROR_RATE if looks == 1 else SEQUENTIAL_RATE / looks) / max(1, len(pairs))
    better = {
        (first, second)
        for first, second in pairs
        if _least_chance(usable[first], usable[second], kind, cuts, looks) < rate
    }
    groups: list[list[str]] = []
    for model in known:
        if groups and (groups[-1][0], model) not in better:
            groups[-1].append(model)
        else:
            groups.append([model])
    return Verdict(groups, better, [model for model in scores if model not in known])


def _cuts(scores: Sequence[Sequence[float]], kind: Kind) -> list[Kind]:
    """The goals that part seeds of one model into two kinds; each one after the first, in a part.

    Returns:
        The kind with each goal: of all seeds, then of the better ones, then of the others.
    """
    pooled = sorted(value for own in scores for value in own)
    gaps = [(after - value, (after + value) / 2) for value, after in pairwise(pooled)]
    gaps.sort(reverse=True)
    goal = kind.solved_at if any(map(kind.split, scores)) else None
    for (width, middle), (following, _) in pairwise(gaps[:MOST_KINDS]):
        if goal is not None or not any(own and min(own) < middle < max(own) for own in scores):
            break  # a gap that no model straddles may be a difference of models
        goal = gaps[0][1] if width > WIDE * following else None
    if goal is None:
        return []
    cut, rest = kind._replace(solved_at=goal), kind._replace(solved_at=None)
    better = [cut.solved(own) for own in scores]
    others = [[v for v in own if v not in good] for own, good in zip(scores, better, strict=True)]
    return [cut, *_cuts(better, rest), *_cuts(others, rest)]


def _least_chance(
    first: Sequence[float], second: Sequence[float], kind: Kind, cuts: Sequence[Kind], looks: int
) -> float:
    """The chance of a pair; with several looks, the smallest over all looks of both models."""
    if looks == 1:
        return _chance(first, second, kind, cuts)
    last = min(len(first), len(second), FIRST_LOOK + looks - 1)
    seen = ((first[:n], second[:n]) for n in range(FIRST_LOOK, last + 1))
    return min((_chance(*own, kind, cuts) for own in seen), default=1.0)


def _chance(
    first: Sequence[float], second: Sequence[float], kind: Kind, cuts: Sequence[Kind]
) -> float:
    """Probability of such an advantage of the first or the second of equal models.

    It is 1 if the first has none.
    """
    for cut in cuts:
        one, other = [(len(cut.solved(own)), len(own)) for own in (first, second)]
        shares = one[0] / one[1], other[0] / other[1]
        if {*shares} not in ({0.0}, {1.0}):
            return barnard(one, other) if shares[0] > shares[1] else 1.0
    difference = (fmean(first) - fmean(second)) * (1 if kind.higher_is_better else -1)
    free = [len(own) - 1 for own in (first, second)]
    squares = [_deviation(own, kind.problems) ** 2 for own in (first, second)]
    pooled = sum(n * square for n, square in zip(free, squares, strict=True)) / sum(free)
    error = math.sqrt(pooled * (1 / len(first) + 1 / len(second)))
    if difference <= 0 or error == 0:
        return 1.0 if difference <= 0 else 0.0
    return two_sided(difference / error, sum(free))


@cache
def barnard(first: tuple[int, int], second: tuple[int, int]) -> float:
    """Barnard's test: the largest chance, over all shares, of as large a difference of shares.

    Args:
        first: Seeds that solved the task, and all seeds, of a model.
        second: The same for another model.

    Example:
        >>> round(barnard((6, 6), (0, 6)), 6) == round(2 * 0.5**12, 6)
        True
    """
    (solved, n), (others, m) = first, second
    shares = np.linspace(0.005, 0.995, 199)

    def chances(most: int) -> np.ndarray:
        k = np.arange(most + 1)[:, None]
        ways = np.array([math.comb(most, int(own)) for own in k[:, 0]])[:, None]
        return ways * shares**k * (1 - shares) ** (most - k)

    differences = np.abs(np.arange(n + 1)[:, None] / n - np.arange(m + 1) / m)
    extreme = differences >= abs(solved / n - others / m) - 1e-9
    return float(np.einsum("ip,jp,ij->p", chances(n), chances(m), extreme).max())


def _deviation(scores: Sequence[float], problems: int) -> float:
    """Standard deviation over seeds, but at least the sampling error of one score."""
    floor = 0.0
    if problems:
        share = (fmean(scores) * problems + 1) / (problems + 2)  # an error even at 0 and 1
        floor = math.sqrt(max(0.0, share * (1 - share)) / problems)
    return max(stdev(scores), floor)


def two_sided(t: float, freedom: float) -> float:
    """Probability that Student's t is at least as far from 0.

    With t = sqrt(freedom) tan(a), the density of a is proportional to cos(a)^(freedom - 1).
    """
    edges = np.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, 501)
    middles, width = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
    beyond = float((np.cos(middles) ** (freedom - 1)).sum() * width)
    log_whole = math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2) + math.log(math.pi) / 2
    return 2 * beyond / math.exp(log_whole)
