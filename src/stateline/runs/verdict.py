"""Which models are clearly better than others, judged by the spread over their seeds.

Each pair of models is judged by its own scores. Of all comparisons of equal models, at most
:data:`ERROR_RATE` tell any pair apart: each pair gets its share of the rate (Bonferroni), so the
verdict of two models depends on their scores and on the number of pairs, and on nothing else.

A pair is compared by Welch's t-test of the difference of the mean scores, which does not assume
that both models spread alike. The standard deviation over seeds is never taken to be smaller than
the sampling error of one score, so that a few seeds that agree by chance do not decide.

Where some seeds of a pair solve a task and others are far from it, the shares of seeds that solve
it are compared, by Barnard's exact test. So two models of which one solves a task with all of n
seeds and the other with none are told apart if 2 / 4^n, the chance of that if a seed solves it by
luck, is below the rate of a pair: three seeds suffice for one pair, four for six, five for 25.

The t-test learns from the scores how much seeds vary. **Seeds that agree** to within the sampling
error show no variation: the two models may be on two levels, such as a guess and half of the
answer, and equal models may reach one or the other by luck. So if all seeds of a pair lie on two
levels, the chance is at least that of Barnard's test of the shares on the better one: 2 / 4^n if
all scores of one model are above all of the other. Levels around which seeds vary by more than the
sampling error, or levels of losses, whose sampling error is not known, are taken for a difference.

**One may look after every seed** if the number of looks is fixed before (:func:`judge` with
``looks``). A pair is then told apart if the test at one of the looks tells it apart; each look gets
its share of the rate. Only the first n seeds of both count at look n, so the rate holds for any
choice of the models that get more seeds. The chance 2 / 4^n needs no such share: what all seeds of
a pair show at the last look, they have shown at all others.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np

ERROR_RATE = 0.05
"""Probability that any pair of equal models is told apart, over all pairs of a task at one length,
and over all looks at their scores."""

FIRST_LOOK = 3
"""Seeds of each model at the first look."""

SPLIT = 0.1
"""Smallest distance between solving and other seeds for which they count as two kinds, relative to
the score that counts as solved."""

AGREE = 2
"""Seeds agree if the variance of their scores is less than this many times the sampling error's."""


class ScoreKind(NamedTuple):
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


class Share(NamedTuple):
    """How many of some seeds are of the better of two kinds."""

    good: int
    seeds: int

    @property
    def part(self) -> float:
        """The share, from 0 to 1."""
        return self.good / self.seeds


class Difference(NamedTuple):
    """A test of two models.

    Attributes:
        value: Score of the first minus that of the second; of shares, if these were compared.
        chance: Probability of such a difference of equal models, of either sign and at any look;
            the models are told apart if it is below the rate of the pair.
        rate: Error rate of the interval.
        error: Standard error of the difference of the mean scores.
        freedom: Its degrees of freedom.
        shares: The seeds of the better kind, if their shares were compared; else ``None``.
    """

    value: float
    chance: float
    rate: float
    error: float = 0.0
    freedom: float = math.inf
    shares: tuple[Share, Share] | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the difference, at the rate of the pair."""
        if self.shares:
            return _newcombe(*self.shares, self.rate)
        reach = self.error * limit(self.rate, self.freedom) if self.error else 0.0
        return self.value - reach, self.value + reach


class Pair(NamedTuple):
    """Two models, the better one first, and whether it is clearly better.

    Attributes:
        better: The model with the better scores.
        worse: The other one.
        difference: The difference between them; of losses it is negative.
        told: Whether they are told apart.
    """

    better: str
    worse: str
    difference: Difference
    told: bool


class Verdict(NamedTuple):
    """The outcome of a comparison of scores.

    Attributes:
        order: Models from best to worst: by the share of seeds that solve the task, then by mean.
        pairs: All pairs of them.
        undecidable: Models that have no spread (fewer than two seeds) or a seed without a score;
            nothing is claimed about them.
    """

    order: list[str]
    pairs: list[Pair]
    undecidable: list[str]

    @property
    def better(self) -> set[tuple[str, str]]:
        """Pairs of models of which the first is clearly better than the second."""
        return {(pair.better, pair.worse) for pair in self.pairs if pair.told}

    @property
    def winner(self) -> str | None:
        """The one model that is clearly better than every other; ``None`` if there is none."""
        beaten = len(self.order) + len(self.undecidable) - 1
        wins = (m for m in self.order if sum(first == m for first, _ in self.better) == beaten)
        return next(wins, None) if beaten else None


def judge(
    scores: Mapping[str, Sequence[float | None]], kind: ScoreKind, *, looks: int = 1
) -> Verdict:
    """Judge models by their scores.

    Args:
        scores: One score per seed, in the order of the seeds, by model; ``None`` or NaN where
            training diverged.
        kind: What the scores are.
        looks: Number of looks that were allowed, the first after :data:`FIRST_LOOK` seeds; 1 for a
            number of seeds that was fixed before.

    Returns:
        The order of the models, and every pair with its difference and its verdict.

    Example:
        >>> verdict = judge({"a": [0.9, 0.91, 0.92], "b": [0.2, 0.21, 0.2]}, ScoreKind(True))
        >>> verdict.order, verdict.winner
        (['a', 'b'], 'a')
    """
    usable = {
        model: [float(value) for value in own if value is not None and math.isfinite(value)]
        for model, own in scores.items()
    }
    known = [m for m in scores if len(usable[m]) == len(scores[m]) >= 2]
    side = 1 if kind.higher_is_better else -1

    def rank(model: str) -> tuple[float, float]:
        own = usable[model]
        return len(kind.solved(own)) / len(own), side * fmean(own)

    known.sort(key=rank, reverse=True)
    couples = list(combinations(known, 2))
    pairs = []
    for first, second in couples:
        found = compare(usable[first], usable[second], kind, pairs=len(couples), looks=looks)
        if (found.value if found.shares else side * found.value) < 0:
            first, second = second, first
            found = compare(usable[first], usable[second], kind, pairs=len(couples), looks=looks)
        pairs.append(Pair(first, second, found, found.chance < ERROR_RATE / len(couples)))
    return Verdict(known, pairs, [model for model in scores if model not in known])


def compare(
    first: Sequence[float],
    second: Sequence[float],
    kind: ScoreKind,
    *,
    pairs: int = 1,
    looks: int = 1,
) -> Difference:
    """Test the difference of two models by the scores of their seeds.

    Args:
        first: Scores of a model, at least two.
        second: Scores of another model.
        kind: What the scores are.
        pairs: Number of pairs that are judged together; it sets the width of the interval.
        looks: Number of looks that were allowed, see :func:`judge`.
    """
    found = _test(first, second, kind, ERROR_RATE / pairs / looks)
    if looks == 1:
        return found
    last = min(len(first), len(second), FIRST_LOOK + looks - 1)
    chances = [1.0]
    for n in range(FIRST_LOOK, last + 1):
        seen = _test(first[:n], second[:n], kind)
        if seen.value * found.value > 0:  # else the look points the other way
            shares = {share.part for share in seen.shares or ()}
            chances.append(seen.chance * (1 if shares == {0.0, 1.0} else looks))
    return found._replace(chance=min(chances))


def seeds_to_tell(
    first: Sequence[float], second: Sequence[float], kind: ScoreKind, pairs: int
) -> int | None:
    """The fewest seeds with the spread of these that would tell two models apart.

    Returns:
        ``None`` if not even three times the seeds would.
    """
    several = [[*own] * 3 for own in (first, second)]
    for n in range(max(len(first), len(second)) + 1, min(map(len, several)) + 1):
        if compare(several[0][:n], several[1][:n], kind).chance < ERROR_RATE / pairs:
            return n
    return None


def _test(
    first: Sequence[float], second: Sequence[float], kind: ScoreKind, rate: float = ERROR_RATE
) -> Difference:
    """One test of all scores, with an interval at an error rate."""
    scores = (first, second)
    if any(map(kind.split, [*scores, [*first, *second]])):
        one, other = (Share(len(kind.solved(own)), len(own)) for own in scores)
        if {one.part, other.part} not in ({0.0}, {1.0}):
            return _of_shares(one, other, rate)
    difference = fmean(first) - fmean(second)
    error, freedom = _error([(_deviation(own, kind.problems), len(own)) for own in scores])
    chance = _chance(difference, error, freedom)
    if shares := _levels(first, second, kind):
        luck = _of_shares(*shares, rate)
        if luck.chance > chance:
            return luck
    return Difference(difference, chance, rate, error, freedom)


def _of_shares(one: Share, other: Share, rate: float) -> Difference:
    """Barnard's test of two shares."""
    return Difference(one.part - other.part, barnard(one, other), rate, shares=(one, other))


def _levels(
    first: Sequence[float], second: Sequence[float], kind: ScoreKind
) -> tuple[Share, Share] | None:
    """The seeds on the better of two levels; ``None`` if not all seeds agree with their level.

    Levels are those of the models, if these lie apart, and else parted by the widest gap.
    """
    if not kind.problems:
        return None
    low, high = sorted((first, second), key=max)
    if max(low) >= min(high):
        every = sorted([*first, *second])
        cut = max(range(1, len(every)), key=lambda n: every[n] - every[n - 1])
        low, high = every[:cut], every[cut:]
    squares = [
        (len(own) - 1) * (stdev(own) / _sampling(own, kind.problems)) ** 2
        for own in (low, high)
        if len(own) > 1
    ]
    if sum(squares) >= AGREE * (len(first) + len(second) - 2):
        return None
    better = high if kind.higher_is_better else low
    one, other = (sum(score in better for score in own) for own in (first, second))
    return Share(one, len(first)), Share(other, len(second))


@cache
def barnard(first: tuple[int, int], second: tuple[int, int]) -> float:
    """Barnard's test: the largest chance, over all shares, of as large a Wald statistic.

    With the pooled share p, the statistic is the difference of the shares of n and m seeds divided
    by sqrt(p (1 - p) (1 / n + 1 / m)) (Barnard, 1947; Suissa and Shuster, 1985).

    Args:
        first: Seeds that solved the task, and all seeds, of a model.
        second: The same for another model.

    Example:
        >>> round(barnard((6, 6), (0, 6)), 6) == round(2 * 0.5**12, 6)
        True
        >>> round(barnard((5, 8), (0, 8)), 4)
        0.0081
    """
    (solved, n), (others, m) = first, second
    shares = np.linspace(0.0, 1.0, 2001)

    def chances(most: int) -> np.ndarray:
        k = np.arange(most + 1)[:, None]
        ways = np.array([math.comb(most, int(own)) for own in k[:, 0]])[:, None]
        return ways * shares**k * (1 - shares) ** (most - k)

    one, other = np.arange(n + 1)[:, None], np.arange(m + 1)
    pooled = (one + other) / (n + m)
    error = np.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    wald = np.abs(one / n - other / m) / np.where(error > 0, error, 1.0)
    extreme = wald >= wald[solved, others] - 1e-9
    return float(min(1.0, np.einsum("ip,jp,ij->p", chances(n), chances(m), extreme).max()))


def wilson(part: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """The interval of a share of ``n``, which is wider than zero also at 0 and 1 (Wilson, 1927).

    Args:
        part: The share, from 0 to 1.
        n: Number of trials.
        z: Standard deviations of the interval; 1.96 for 95%.

    Example:
        >>> [round(end, 3) for end in wilson(1.0, 16)]
        [0.806, 1.0]
    """
    middle, room = part + z * z / (2 * n), z * math.sqrt(part * (1 - part) / n + (z / n) ** 2 / 4)
    low, high = ((middle + sign * room) / (1 + z * z / n) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def _newcombe(first: Share, second: Share, rate: float) -> tuple[float, float]:
    """The interval of a difference of shares, from Wilson's intervals (Newcombe, 1998)."""
    z = limit(rate, math.inf)
    (low, high), (other_low, other_high) = (wilson(s.part, s.seeds, z) for s in (first, second))
    value = first.part - second.part
    below = math.hypot(first.part - low, other_high - second.part)
    return value - below, value + math.hypot(high - first.part, second.part - other_low)


def stdev(scores: Sequence[float]) -> float:
    """Standard deviation of a sample; that of ``statistics`` adds fractions, 20 times slower."""
    mean = fmean(scores)
    return math.sqrt(math.fsum((own - mean) ** 2 for own in scores) / (len(scores) - 1))


def _sampling(scores: Sequence[float], problems: int) -> float:
    """The sampling error of one score, which is the share of problems that are right."""
    share = (fmean(scores) * problems + 1) / (problems + 2)  # an error even at 0 and 1
    return math.sqrt(max(0.0, share * (1 - share)) / problems)


def _deviation(scores: Sequence[float], problems: int) -> float:
    """Standard deviation over seeds, but at least the sampling error of one score."""
    return max(stdev(scores), _sampling(scores, problems) if problems else 0.0)


def welch(first: Sequence[float], second: Sequence[float] = ()) -> tuple[float, float]:
    """Welch's t-test: the difference of two means, or one mean, and its chance if it were zero.

    The chance is 1 where nothing is known: for a sample of one value, or one that lacks a value.
    """
    samples = [own for own in (first, second) if own]
    difference = fmean(first) - (fmean(second) if second else 0.0)
    if min(map(len, samples)) < 2 or not math.isfinite(difference):
        return difference, 1.0
    return difference, _chance(difference, *_error([(stdev(own), len(own)) for own in samples]))


def _error(spreads: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Standard error of a difference of means, and Welch's degrees of freedom.

    Args:
        spreads: Deviation and number of values of each sample.
    """
    parts = [(deviation**2 / n, n - 1) for deviation, n in spreads]
    square = sum(part for part, _ in parts)
    if square == 0:
        return 0.0, math.inf
    return math.sqrt(square), square**2 / sum(part**2 / free for part, free in parts)


def _chance(difference: float, error: float, freedom: float) -> float:
    """Probability that a difference of means is at least as far from 0 by chance."""
    if difference == 0 or error == 0:
        return 1.0 if difference == 0 else 0.0
    return two_sided(abs(difference) / error, freedom)


def two_sided(t: float, freedom: float) -> float:
    """Probability that Student's t is at least as far from 0.

    With t = sqrt(freedom) tan(a), the density of a is proportional to cos(a)^(freedom - 1).
    """
    if math.isinf(freedom):
        return math.erfc(t / math.sqrt(2))
    edges = np.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, 501)
    middles, width = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
    beyond = float((np.cos(middles) ** (freedom - 1)).sum() * width)
    log_whole = math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2) + math.log(math.pi) / 2
    return 2 * beyond / math.exp(log_whole)


@cache
def limit(rate: float, freedom: float) -> float:
    """The value that Student's t exceeds, on either side, with a probability.

    Example:
        >>> round(limit(0.05, 4), 3), round(limit(0.05, math.inf), 3)
        (2.776, 1.96)
    """
    if math.isinf(freedom):
        return NormalDist().inv_cdf(1 - rate / 2)
    edges = np.linspace(math.pi / 2, 0, 8001)  # t = sqrt(freedom) tan(a), as above
    beyond = np.cumsum(np.cos((edges[:-1] + edges[1:]) / 2) ** (freedom - 1))
    angle = float(np.interp(rate, beyond / beyond[-1], edges[1:]))
    return math.sqrt(freedom) * math.tan(angle)
