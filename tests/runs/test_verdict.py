"""Which models are told apart: hardly ever equal ones, always very different ones."""

import math
from statistics import stdev

import numpy as np
import pytest

from stateline.runs.verdict import ERROR_RATE, Kind, judge, two_sided

PROBLEMS = 1024
SHARES = Kind(higher_is_better=True, problems=PROBLEMS)


def drawn(rng: np.random.Generator, mean: float, spread: float, seeds: int) -> list[float]:
    """Shares of right answers that vary with the seed and with the problems drawn."""
    skill = np.clip(rng.normal(mean, spread, seeds), 0, 1)
    return [float(share) for share in rng.binomial(PROBLEMS, skill) / PROBLEMS]


@pytest.mark.parametrize("spread", [0.0, 0.003, 0.05])
@pytest.mark.parametrize("mean", [0.05, 0.5, 0.99])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_equal_models_are_not_told_apart_in_20_trials(
    mean: float, spread: float, seeds: int
) -> None:
    rng = np.random.default_rng([seeds, round(1000 * mean), round(1000 * spread)])
    for _ in range(20):
        scores = {name: drawn(rng, mean, spread, seeds) for name in "ab"}
        assert judge(scores, SHARES).groups in (
            [["a", "b"]],
            [["b", "a"]],
        )


def test_equal_models_that_solve_from_some_seeds_only_are_not_told_apart_in_20_trials() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = {name: list(np.where(rng.random(5) < 0.5, 0.99, 0.1)) for name in "ab"}
        assert not judge(scores, SHARES).better


@pytest.mark.parametrize("seeds", [3, 5])
def test_the_rate_of_false_claims_over_all_pairs_is_as_stated(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    trials, false = 1000, 0
    for _ in range(trials):
        scores = {name: list(rng.normal(0, 1, seeds)) for name in "abcd"}
        false += bool(judge(scores, Kind(True)).better)
    assert false <= 3 * ERROR_RATE * trials


def test_a_real_difference_is_found_in_every_one_of_20_trials() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = {"worse": drawn(rng, 0.5, 0.02, 3), "better": drawn(rng, 0.97, 0.01, 3)}
        scores["same"] = drawn(rng, 0.97, 0.01, 3)
        verdict = judge(scores, SHARES)
        assert [set(group) for group in verdict.groups] == [{"better", "same"}, {"worse"}]
        assert verdict.winner is None
        assert {("better", "worse"), ("same", "worse")} == verdict.better


def test_a_lower_score_wins_where_lower_is_better() -> None:
    scores = {"a": [2.1, 2.11, 2.1], "b": [1.5, 1.51, 1.5]}
    assert judge(scores, Kind(False)).winner == "b"
    assert judge(scores, Kind(True)).winner == "a"


def test_scores_that_are_identical_tie() -> None:
    verdict = judge({"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0]}, Kind(True))
    assert (verdict.groups, verdict.better, verdict.winner) == ([["a", "b"]], set(), None)


def test_scores_without_any_spread_differ() -> None:
    assert judge({"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0]}, Kind(True)).winner == "b"


@pytest.mark.parametrize(("seeds", "t"), [(2, 22.327), (3, 7.173), (5, 4.501)])
def test_a_pair_is_told_apart_from_the_printed_limit_of_t(seeds: int, t: float) -> None:
    """At a chance of 0.002, by all seeds: 2 (seeds - 1) degrees of freedom."""
    scores = [0.1 * seed**2 for seed in range(seeds)]
    limit = t * stdev(scores) * math.sqrt(2 / seeds)
    for shift, told in [(1.01 * limit, True), (0.99 * limit, False)]:
        shifted = [score + shift for score in scores]
        assert bool(judge({"a": scores, "b": shifted}, Kind(True)).better) == told


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_models_that_only_some_seeds_solve_are_judged_by_the_share_of_these(
    higher_is_better: bool,
) -> None:
    """By its mean, the model that never solves the task would be above one that seldom does."""
    sign = 1.0 if higher_is_better else -1.0
    kind = Kind(higher_is_better, solved_at=0.95 * sign)
    scores = {"never": [0.94] * 9, "seldom": [0.96] * 3 + [0.3] * 6, "often": [0.96] * 9}
    verdict = judge({name: [sign * v for v in own] for name, own in scores.items()}, kind)
    assert verdict.groups == [["often", "seldom"], ["never"]]


@pytest.mark.parametrize(("models", "seeds", "looks"), [(5, 3, 1), (5, 6, 4), (2, 4, 1)])
@pytest.mark.parametrize("levels", [(0.6, 0.9), (0.3, 0.6, 0.95), (0.6, 0.998)])
@pytest.mark.parametrize("solved_at", [None, 0.99])
def test_equal_models_with_plateaus_are_seldom_told_apart(
    models: int, seeds: int, looks: int, levels: tuple[float, ...], solved_at: float | None
) -> None:
    """By the t-test alone, 20 % of five models with three seeds and two plateaus would be.

    Two models with four seeds and two plateaus are in 2 / 4^4 = 0.8 % of comparisons.
    """
    rng, trials, false = np.random.default_rng(seeds), 100, 0
    for _ in range(trials):
        means = rng.choice(levels, size=(models, seeds))
        scores = dict(enumerate((means + rng.normal(0, 0.001, means.shape)).tolist()))
        named = {str(model): own for model, own in scores.items()}
        false += bool(judge(named, Kind(True, PROBLEMS, solved_at), looks=looks).better)
    assert false <= 4


@pytest.mark.parametrize("later", [0.99, 0.45])
def test_a_look_that_points_the_other_way_is_no_evidence(later: float) -> None:
    """After three seeds b was better; with all six, a is."""
    scores = {"a": [0.2, 0.201, 0.2, later, later, later], "b": [0.3, 0.301, 0.3]}
    assert not judge(scores, Kind(True, solved_at=0.95), looks=4).better


def test_models_on_one_side_of_two_kinds_are_told_apart_by_their_scores() -> None:
    """One bad seed of another model does not hide a clear difference."""
    scores = {"a": [2.0, 2.01, 2.0], "b": [2.5, 2.51, 2.5], "odd": [2.0, 2.01, 4.5]}
    assert judge(scores, Kind(False)).better == {("a", "b")}


@pytest.mark.parametrize("own", [[], [0.99], [0.99, None, 0.99], [math.nan, 0.99]])
def test_nothing_is_claimed_without_a_spread_or_a_score(own: list[float | None]) -> None:
    verdict = judge({"a": own, "b": [0.1, 0.1, 0.11]}, SHARES)
    assert (verdict.groups, verdict.undecidable, verdict.better) == ([["b"]], ["a"], set())
    assert verdict.winner is None


@pytest.mark.parametrize(
    ("t", "freedom", "probability"),
    [(12.706, 1, 0.05), (4.303, 2, 0.05), (4.604, 4, 0.01), (2.228, 10, 0.05), (1.98, 120, 0.05)],
)
def test_the_probabilities_are_those_of_the_printed_tables(
    t: float, freedom: float, probability: float
) -> None:
    assert two_sided(t, freedom) == pytest.approx(probability, rel=0.005)
