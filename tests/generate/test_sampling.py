from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateline.errors import InputError
from stateline.generate import GREEDY, Sampling, choose, probabilities, uniform

FREE = Sampling(temperature=1.0)


def numbers(seed: int, row: int, count: int) -> torch.Tensor:
    """The first numbers of a row."""
    return uniform(torch.tensor([[seed, row, 0]]), count)[0]


# In descending order of probability: tokens 2, 0, 3, 1.
PROBABILITIES = torch.tensor([0.3, 0.05, 0.5, 0.15])


def shares(sampling: Sampling) -> list[float]:
    """How often each token is drawn."""
    draws = 5_000
    logits = PROBABILITIES.log().expand(draws, -1)
    tokens = choose(logits, sampling, numbers(0, 0, draws))
    return (tokens.bincount(minlength=4) / draws).tolist()


def test_free_sampling_follows_the_probabilities() -> None:
    assert shares(FREE) == pytest.approx(PROBABILITIES.tolist(), abs=0.02)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_is_the_root_of_the_probabilities(temperature: float) -> None:
    powers = PROBABILITIES ** (1 / temperature)
    wanted = (powers / powers.sum()).tolist()
    assert shares(Sampling(temperature)) == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize(
    ("top_p", "nucleus"),
    [
        (0.1, [2]),
        (0.49, [2]),
        (0.51, [2, 0]),
        (0.79, [2, 0]),
        (0.81, [2, 0, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, nucleus: list[int]) -> None:
    kept = torch.zeros(4)
    kept[nucleus] = PROBABILITIES[nucleus]
    assert shares(Sampling(1.0, top_p=top_p)) == pytest.approx(
        (kept / kept.sum()).tolist(), abs=0.02
    )
    assert {token for token, share in enumerate(shares(Sampling(1.0, top_p=top_p))) if share} == {
        *nucleus
    }


@pytest.mark.parametrize("top_k", [1, 2, 3, 9])
def test_top_k_keeps_so_many_tokens(top_k: int) -> None:
    drawn = [token for token, share in enumerate(shares(Sampling(1.0, top_k=top_k))) if share]
    assert drawn == sorted([2, 0, 3, 1][:top_k])


def test_top_p_counts_the_probabilities_after_top_k() -> None:
    """Of the two likeliest, 0.5 and 0.3, the first alone has 0.625."""
    assert shares(Sampling(1.0, top_k=2, top_p=0.6)) == [0, 0, 1, 0]
    assert shares(Sampling(1.0, top_p=0.6)) != [0, 0, 1, 0]


def from_transformers(sampling: Sampling, logits: torch.Tensor) -> torch.Tensor:
    """The distribution of its processors, in the order in which it applies them."""
    from transformers.generation import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    for warper in (
        TemperatureLogitsWarper(sampling.temperature),
        TopKLogitsWarper(sampling.top_k or logits.shape[1]),
        TopPLogitsWarper(sampling.top_p or 1.0),
        MinPLogitsWarper(sampling.min_p or 0.0),
    ):
        logits = warper(torch.empty(0), logits)
    return logits.softmax(-1)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, min_p=0.2),
        Sampling(3.0, min_p=0.2),
        Sampling(1.0, min_p=1.0),
        Sampling(2.0, top_k=9, top_p=0.8, min_p=0.3),
    ],
)
def test_min_p_keeps_what_transformers_keeps(sampling: Sampling) -> None:
    logits = 2 * torch.randn(50, 12, generator=torch.Generator().manual_seed(0)).double()
    found, wanted = probabilities(logits, sampling), from_transformers(sampling, logits)
    torch.testing.assert_close(found, wanted)
    assert (found == 0).equal(wanted == 0)


def test_min_p_compares_with_the_largest_probability_at_this_temperature() -> None:
    """0.15 / 0.5 is 0.3, and the root of that is 0.55."""
    logits = PROBABILITIES.log()[None]
    assert (probabilities(logits, Sampling(1.0, min_p=0.31)) > 0).tolist() == [[True, False] * 2]
    assert probabilities(logits, Sampling(2.0, min_p=0.54))[0, 3] > 0


def test_ties_are_broken_towards_the_first_token() -> None:
    assert choose(torch.zeros(2, 4), GREEDY).tolist() == [0, 0]


def test_the_numbers_of_rows_are_fixed_by_seed_row_and_count_alone() -> None:
    keys = torch.tensor([[3, 0, 0], [3, 1, 0], [3, 0, 1], [4, 0, 0]])
    together = uniform(keys, 1)
    assert torch.cat([uniform(key[None], 1) for key in keys]).equal(together)
    assert len(together.unique()) == 4


@pytest.mark.parametrize(("seed", "row"), [(0, 0), (0, 1), (2**63 - 1, 5)])
def test_the_numbers_of_a_row_are_uniform_and_unrelated(seed: int, row: int) -> None:
    found = numbers(seed, row, 4_000)
    assert 0 < float(found.min()) < 0.01
    assert 0.99 < float(found.max()) <= 1
    assert float(found.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(found.var()) == pytest.approx(1 / 12, abs=0.005)
    pairs = torch.stack([found[:-1], found[1:]])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.05


@pytest.mark.parametrize("number", [1e-300, 0.5, 1.0])
def test_a_token_of_no_probability_is_never_chosen(number: float) -> None:
    none = float("-inf")
    logits = torch.tensor([[none, 0.0, none, 0.3, none]])
    token = int(choose(logits, FREE, torch.tensor([number], dtype=torch.float64)))
    assert token == (1 if number < 0.4 else 3)


def test_rows_are_chosen_by_their_own_numbers() -> None:
    logits = PROBABILITIES.log().expand(3, -1)  # cumulated: 0.3, 0.35, 0.85, 1
    assert choose(logits, FREE, torch.tensor([0.29, 0.84, 0.9])).tolist() == [0, 2, 3]


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0], [-2.0, -1.5, -3.0]])
    seen = torch.tensor([[True, False, False], [False, True, False]])
    for penalty, wanted in ((1.3, [0, 1]), (1.34, [1, 0])):
        sampling = Sampling(repetition_penalty=penalty)
        assert choose(logits, sampling, seen=seen).tolist() == wanted


def test_the_repetition_penalty_concerns_no_token_by_default() -> None:
    logits = torch.tensor([[2.0, 1.5]])
    assert choose(logits, Sampling(repetition_penalty=4.0)).tolist() == [0]


def test_the_repetition_penalty_comes_before_the_temperature() -> None:
    logits, seen = torch.tensor([[2.0, 0.0]]), torch.tensor([[True, False]])
    sampling = Sampling(0.5, repetition_penalty=4.0)
    share = float(torch.tensor([0.5 / 0.5, 0.0]).softmax(dim=0)[0])
    for number, token in ((share - 0.01, 0), (share + 0.01, 1)):
        assert choose(logits, sampling, torch.tensor([number]), seen).tolist() == [token]


def test_choosing_leaves_its_input_alone() -> None:
    logits, seen = torch.randn(2, 9), torch.ones(2, 9, dtype=torch.bool)
    before = logits.clone()
    choose(logits, Sampling(0.7, 3, 0.5, 1.2), torch.tensor([0.2, 0.6]), seen)
    assert logits.equal(before)


@pytest.mark.parametrize("penalty", [0.0, -1.0, 1e-308, 1e10])
def test_a_penalty_must_be_in_range(penalty: float) -> None:
    with pytest.raises(InputError, match=r"to be a finite number from 1e-09 to 1e\+09, got"):
        Sampling(repetition_penalty=penalty)


@pytest.mark.parametrize("penalty", [1e-9, 1e9])
def test_the_largest_penalties_do_not_overflow(penalty: float) -> None:
    logits = torch.tensor([[300.0, -300.0, 0.0]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        sampling = Sampling(1.0, repetition_penalty=penalty)
        seen = torch.ones(1, 3, dtype=torch.bool)
        token = choose(logits.to(dtype), sampling, torch.tensor([0.9]), seen)
        assert token.tolist() == [2 if penalty > 1 else 0]


@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), "0.7", [1.0]])
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "repetition_penalty", "min_p"])
@pytest.mark.usefixtures("unannotated")
def test_settings_must_be_finite_numbers(name: str, wrong: Any) -> None:
    with pytest.raises(InputError, match=f"^Sampling wants {name} to be "):
        Sampling(**{name: wrong})


def test_numbers_of_pytorch_become_plain_numbers() -> None:
    assert type(Sampling(torch.tensor(0.5)).temperature) is float  # type: ignore[arg-type]


def test_at_the_smallest_temperatures_each_row_takes_its_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 100.0], [-100.0, -200.0]])
    assert choose(logits, Sampling(1e-307), torch.tensor([0.5, 0.5])).tolist() == [1, 0]


def test_top_k_may_be_any_integer_of_64_bits() -> None:
    logits = torch.tensor([[0.0, 1.0]])
    assert choose(logits, Sampling(1.0, top_k=2**63 - 1), torch.tensor([0.1])).tolist() == [0]
    with pytest.raises(InputError, match="Sampling wants top_k to fit into 64 bits"):
        Sampling(top_k=2**63)


def test_logits_that_are_nan_give_a_token_of_the_vocabulary() -> None:
    logits = torch.full((1, 4), float("nan"))
    assert 0 <= int(choose(logits, FREE, torch.tensor([0.5]))) < 4


def by_numpy(seed: int, row: int, count: int) -> float:
    return 1 - np.random.Generator(np.random.Philox(key=[seed, row], counter=count)).random()


integers = st.integers(0, 2**63 - 1)


@given(st.lists(st.tuples(integers, integers, st.integers(0, 2**63 - 10)), min_size=1, max_size=5))
def test_random_numbers_are_those_of_numpys_philox_to_the_bit(keys: list[tuple[int, ...]]) -> None:
    found = uniform(torch.tensor(keys), 3)
    wanted = [[by_numpy(seed, row, count + i) for i in range(3)] for seed, row, count in keys]
    assert found.tolist() == wanted
    assert uniform(torch.tensor(keys), 1)[:, 0].tolist() == [numbers[0] for numbers in wanted]
