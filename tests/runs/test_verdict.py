"""Which models are told apart: hardly ever equal ones, always very different ones."""

import importlib.util
import math
from pathlib import Path
from statistics import stdev
from types import ModuleType

import numpy as np
import pytest

from stateline.runs.verdict import (
    ERROR_RATE,
    ScoreKind,
    Share,
    barnard,
    compare,
    judge,
    limit,
    seeds_to_tell,
    two_sided,
)

PROBLEMS = 1024
SHARES = ScoreKind(higher_is_better=True, problems=PROBLEMS)


def drawn(rng: np.random.Generator, mean: float, spread: float, seeds: int) -> list[float]:
    """Shares of right answers that vary with the seed and with the problems drawn."""
    skill = np.clip(rng.normal(mean, spread, seeds), 0, 1)
    return [float(share) for share in rng.binomial(PROBLEMS, skill) / PROBLEMS]


FIVE = {
    "h3+attention": [0.976, 0.927, 0.968],
    "attention": [0.675, 0.629, 0.692],
    "s4d": [0.285, 0.204, 0.222],
    "lstm": [0.220, 0.244, 0.274],
    "h3": [0.928, 0.312, 0.320],
}
"""Strings copied by three seeds of five models, one of which once was lucky."""

COPYING = ScoreKind(higher_is_better=True, problems=1024, solved_at=0.95)


def test_a_lucky_seed_of_one_model_leaves_the_verdicts_of_the_others() -> None:
    four = {model: own for model, own in FIVE.items() if model != "h3"}
    assert len(judge(four, COPYING).better) == 5
    assert judge(FIVE, COPYING).better == judge(four, COPYING).better


def test_a_third_model_changes_a_pair_by_the_number_of_pairs_alone() -> None:
    """Whatever its scores: the chance of the pair is the same, and its rate is a third."""
    two = {"a": [0.5, 0.52, 0.54], "b": [0.58, 0.60, 0.62]}
    (alone,) = judge(two, COPYING).pairs
    assert alone.difference.chance < 0.05 / 3 or alone.told
    for own in ([0.1, 0.1, 0.1], [0.99, 0.1, 0.99], [0.55, 0.57, 0.6], [0.98, 0.97, 0.99]):
        found = judge(two | {"c": own}, COPYING).pairs
        (pair,) = [p for p in found if "c" not in (p.better, p.worse)]
        assert pair.difference.chance == alone.difference.chance
        assert pair.difference.value == alone.difference.value
        assert pair.told == (alone.difference.chance < ERROR_RATE / 3)
        assert pair.difference.interval[0] < alone.difference.interval[0]


def test_a_pair_is_told_apart_where_its_interval_leaves_zero_out() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        scores = {name: list(rng.normal(mean, 1, 4)) for mean, name in enumerate("abcd")}
        for pair in judge(scores, ScoreKind(True)).pairs:
            if pair.difference.shares is None:
                assert pair.told == (pair.difference.interval[0] > 0)


@pytest.mark.parametrize(
    ("seeds", "models", "told"), [(3, 2, True), (3, 3, False), (4, 4, True), (4, 5, False)]
)
def test_all_against_none_is_luck_in_two_of_four_to_the_seeds(
    seeds: int, models: int, told: bool
) -> None:
    """3.1 % of three seeds are enough for one pair; 0.8 % of four for six pairs."""
    scores = {"all": [0.99] * seeds, "none": [0.3, 0.31, 0.32, 0.3][:seeds]}
    scores |= {f"other {n}": [0.5, 0.51, 0.52, 0.5][:seeds] for n in range(models - 2)}
    found = judge(scores, COPYING)
    assert (("all", "none") in found.better) == told
    (pair,) = [p for p in found.pairs if {p.better, p.worse} == {"all", "none"}]
    assert pair.difference.shares == (Share(seeds, seeds), Share(0, seeds))
    assert pair.difference.chance == pytest.approx(2 / 4**seeds)


@pytest.mark.parametrize(
    ("seeds", "others", "told"), [(3, 0, True), (3, 1, False), (4, 1, True), (4, 3, False)]
)
def test_seeds_that_agree_show_levels_and_not_how_seeds_vary(
    seeds: int, others: int, told: bool
) -> None:
    """Equal models that end at 0.3 or 0.6 by luck are so far apart in 2 of 4^seeds pairs."""
    scores = {"high": [0.6, 0.61, 0.59, 0.6][:seeds], "low": [0.3, 0.31, 0.3, 0.29][:seeds]}
    scores |= {f"other {n}": [0.4, 0.5, 0.45, 0.5][:seeds] for n in range(others)}
    (pair,) = [p for p in judge(scores, COPYING).pairs if {p.better, p.worse} == {"high", "low"}]
    assert pair.told == told
    assert pair.difference.chance == pytest.approx(2 / 4**seeds)
    assert pair.difference.shares == (Share(seeds, seeds), Share(0, seeds))


@pytest.mark.parametrize("own", [[0.55, 0.60, 0.65], [0.66, 0.60, 0.54]])
def test_seeds_that_vary_by_more_than_their_sampling_error_are_judged_by_their_spread(
    own: list[float],
) -> None:
    scores = {"high": own, "low": [0.3, 0.31, 0.29], "other": [0.4, 0.5, 0.45]}
    (pair,) = [p for p in judge(scores, COPYING).pairs if {p.better, p.worse} == {"high", "low"}]
    assert pair.difference.shares is None
    assert pair.told == (pair.difference.interval[0] > 0)


@pytest.mark.parametrize(("pairs", "seeds"), [(6, 4), (10, 5), (25, 5), (26, 6)])
def test_the_seeds_that_would_tell_two_models_apart_are_said(pairs: int, seeds: int) -> None:
    all_, none = [0.99, 0.98, 1.0], [0.3, 0.31, 0.3]
    assert seeds_to_tell(all_, none, COPYING, pairs) == seeds
    assert seeds_to_tell(all_, all_, COPYING, pairs) is None


def test_a_look_costs_nothing_where_all_seeds_are_of_one_kind() -> None:
    """Kinds that part the models at the last of four looks have parted them at all others."""
    scores = {"all": [0.99] * 4, "none": [0.3, 0.31, 0.32, 0.3], "c": [0.99, 0.3, 0.99, 0.99]}
    assert ("all", "none") in judge(scores, COPYING, looks=4).better


def rates() -> ModuleType:
    """The simulation whose tables are in the documentation."""
    path = Path(__file__).parents[2] / "examples" / "verdict_rates.py"
    spec = importlib.util.spec_from_file_location("verdict_rates", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SIMULATED = rates()


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("shape", [*SIMULATED.SHAPES])
def test_equal_models_of_any_shape_are_told_apart_in_5_percent(shape: str, look: bool) -> None:
    """More than 19 of 200 families have a chance below 0.4 % at a rate of 5 %."""
    for seeds in (4, 6) if look else (3, 6):
        rate = SIMULATED.false_rate(shape, 3, seeds, 200, look=look)
        assert rate * 200 <= 19


def test_a_real_difference_is_found_in_every_one_of_20_trials() -> None:
    """Three seeds of three models might agree, and then show no more than luck."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = {"worse": drawn(rng, 0.5, 0.02, 4), "better": drawn(rng, 0.97, 0.01, 4)}
        scores["same"] = drawn(rng, 0.97, 0.01, 4)
        verdict = judge(scores, SHARES)
        assert {*verdict.order[:2]} == {"better", "same"}
        assert verdict.winner is None
        assert {("better", "worse"), ("same", "worse")} == verdict.better


def test_a_lower_score_wins_where_lower_is_better() -> None:
    scores = {"a": [2.1, 2.11, 2.1], "b": [1.5, 1.51, 1.5]}
    assert judge(scores, ScoreKind(False)).winner == "b"
    assert judge(scores, ScoreKind(True)).winner == "a"


def test_scores_that_are_identical_tie() -> None:
    verdict = judge({"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0]}, ScoreKind(True))
    assert (verdict.order, verdict.better, verdict.winner) == (["a", "b"], set(), None)


def test_scores_without_any_spread_differ() -> None:
    assert judge({"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0]}, ScoreKind(True)).winner == "b"


@pytest.mark.parametrize(("seeds", "t"), [(2, 4.303), (3, 2.776), (5, 2.306)])
def test_a_pair_is_told_apart_from_the_printed_limit_of_t(seeds: int, t: float) -> None:
    """At a chance of 0.05, by all seeds: 2 (seeds - 1) degrees of freedom."""
    scores = [0.1 * seed for seed in range(seeds)]
    limit = t * stdev(scores) * math.sqrt(2 / seeds)
    for shift, told in [(1.01 * limit, True), (0.99 * limit, False)]:
        shifted = [score + shift for score in scores]
        assert bool(judge({"a": scores, "b": shifted}, ScoreKind(True)).better) == told


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_models_that_only_some_seeds_solve_are_judged_by_the_share_of_these(
    higher_is_better: bool,
) -> None:
    """By its mean, the model that never solves the task would be above one that seldom does."""
    sign = 1.0 if higher_is_better else -1.0
    kind = ScoreKind(higher_is_better, solved_at=0.95 * sign)
    scores = {"never": [0.94] * 9, "seldom": [0.96] * 3 + [0.3] * 6, "often": [0.96] * 9}
    verdict = judge({name: [sign * v for v in own] for name, own in scores.items()}, kind)
    assert verdict.order == ["often", "seldom", "never"]
    assert ("never", "seldom") not in verdict.better
    assert ("often", "seldom") in verdict.better


@pytest.mark.parametrize("later", [0.99, 0.45])
def test_a_look_that_points_the_other_way_is_no_evidence(later: float) -> None:
    """After three seeds b was better; with all six, a is."""
    scores = {"a": [0.2, 0.201, 0.2, later, later, later], "b": [0.3, 0.301, 0.3]}
    assert not judge(scores, ScoreKind(True, solved_at=0.95), looks=4).better


def test_models_on_one_side_of_two_kinds_are_told_apart_by_their_scores() -> None:
    """One bad seed of another model does not hide a clear difference."""
    scores = {"a": [2.0, 2.01, 2.0], "b": [2.5, 2.51, 2.5], "odd": [2.0, 2.01, 4.5]}
    assert judge(scores, ScoreKind(False)).better == {("a", "b")}


@pytest.mark.parametrize("own", [[], [0.99], [0.99, None, 0.99], [math.nan, 0.99]])
def test_nothing_is_claimed_without_a_spread_or_a_score(own: list[float | None]) -> None:
    verdict = judge({"a": own, "b": [0.1, 0.1, 0.11]}, SHARES)
    assert (verdict.order, verdict.undecidable, verdict.better) == (["b"], ["a"], set())
    assert verdict.winner is None


@pytest.mark.parametrize(
    ("t", "freedom", "probability"),
    [(12.706, 1, 0.05), (4.303, 2, 0.05), (4.604, 4, 0.01), (2.228, 10, 0.05), (1.98, 120, 0.05)],
)
def test_the_probabilities_are_those_of_the_printed_tables(
    t: float, freedom: float, probability: float
) -> None:
    assert two_sided(t, freedom) == pytest.approx(probability, rel=0.005)
    assert limit(probability, freedom) == pytest.approx(t, rel=0.005)


@pytest.mark.parametrize(
    ("first", "second", "chance"),
    [((5, 8), (0, 8), 0.00806), ((6, 6), (1, 6), 0.00635), ((5, 5), (2, 7), 0.0166)],
)
def test_barnards_test_is_that_of_scipy(
    first: tuple[int, int], second: tuple[int, int], chance: float
) -> None:
    """Of scipy.stats.barnard_exact, version 1.17.1."""
    assert barnard(first, second) == barnard(second, first) == pytest.approx(chance, rel=2e-3)


def test_seeds_on_two_levels_below_the_goal_are_counted():
    """Levels may be reached by luck: the t-test would give 0.005, not 0.006."""
    kind = ScoreKind(higher_is_better=True, problems=1024, solved_at=0.95)
    first = [0.60, 0.61, 0.60, 0.59, 0.60, 0.61]
    second = [0.30, 0.31, 0.30, 0.29, 0.30, 0.61]
    for one, other in ((first, second), (second, first)):
        found = compare(one, other, kind)
        assert found.shares is not None
        assert sorted(share.good for share in found.shares) == [1, 6]
        assert found.chance == barnard((6, 6), (1, 6))
    assert compare([score + n / 20 for n, score in enumerate(first)], second, kind).shares is None
