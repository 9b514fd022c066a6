import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from stateline import LanguageModel, ModelConfig
from stateline.capacity import (
    BITS,
    ScoreByBits,
    blur_state,
    copy_error,
    copy_error_bound,
    longest_copy,
    measure,
    recalled_bits,
    round_state,
    state_bits,
)
from stateline.errors import InputError
from stateline.models.constructions import ngram_copier, recall_h3
from stateline.models.constructions.automaton import Automaton
from stateline.tasks import AssociativeRecall, Copying, FlipFlop


def model_of(pattern: str, max_len: int | None = None) -> LanguageModel:
    return LanguageModel(ModelConfig(pattern, vocab_size=30, d_model=8, max_len=max_len)).eval()


@given(states=st.integers(1, 10**6), length=st.integers(1, 30), n_letters=st.integers(2, 26))
def test_the_bound_is_that_of_theorem_2_7(states: int, length: int, n_letters: int) -> None:
    exact = max(Fraction(0), 1 - Fraction(states, n_letters**length))
    bound = copy_error_bound(math.log2(states), length, n_letters)
    assert bound == pytest.approx(float(exact), abs=1e-12)


@given(bits=st.floats(0, 50), length=st.integers(1, 8), n_letters=st.integers(2, 26))
def test_the_bits_that_copies_prove_are_those_at_the_bound(
    bits: float, length: int, n_letters: int
) -> None:
    copied = 1 - copy_error_bound(bits, length, n_letters)
    possible = min(bits, length * math.log2(n_letters))
    assert recalled_bits(copied, length, n_letters) == pytest.approx(possible, abs=1e-3)


def test_no_copies_prove_no_bits() -> None:
    assert recalled_bits(0.0, 5) == recalled_bits(1e-9, 3) == 0
    with pytest.raises(InputError, match="score must be a share from 0 to 1, got 98"):
        recalled_bits(98.0, 5)


@given(length=st.integers(1, 1000), n_letters=st.integers(2, 26), less=st.floats(1e-6, 1e4))
def test_a_bit_less_than_the_string_has_fails_in_half_of_the_cases(
    length: int, n_letters: int, less: float
) -> None:
    bits = length * math.log2(n_letters) - 1 - less
    assert copy_error_bound(bits, length, n_letters) > 0.5  # corollary 2.8


@pytest.mark.parametrize("pattern", ["lstm", "h3 lstm", "s4d*2"])
@pytest.mark.parametrize("n_letters", [2, 26])
def test_the_longest_copy_is_the_last_that_the_bound_allows(pattern: str, n_letters: int) -> None:
    model = model_of(pattern)
    longest = longest_copy(model, n_letters)
    assert longest is not None
    at, beyond = (
        copy_error_bound(state_bits(model, n + 2), n, n_letters) for n in (longest, longest + 1)
    )
    assert at == 0 < beyond


def test_a_cache_of_all_tokens_rules_no_length_out() -> None:
    assert longest_copy(model_of("attention lstm")) is None


def test_a_cache_holds_the_tokens_around_the_string_too() -> None:
    """512 bits for each of 12 tokens are enough for 10 letters of 600 bits."""
    model = model_of("attention")
    assert copy_error(model, 10, n_letters=2**600) == 0 < copy_error(model, 12, n_letters=2**600)


def test_no_string_beyond_learned_positions_is_copied() -> None:
    model = model_of("attention", 21)
    assert [copy_error(model, length) for length in (10, 11)] == [0, 1]


@pytest.mark.parametrize(("max_len", "longest"), [(21, 10), (22, 10), (23, 11)])
def test_learned_positions_limit_the_copy(max_len: int, longest: int) -> None:
    """BOS, the string, SEP, and all of the copy but its last letter."""
    assert longest_copy(model_of("attention", max_len)) == longest


@given(bits=st.integers(0, 8), seed=st.integers(0, 100))
def test_a_rounded_number_has_as_many_values_as_its_bits_allow(bits: int, seed: int) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rounded = round_state(x, x.min(), x.max(), bits)
    assert len(rounded.unique()) <= 2**bits
    assert (rounded - x).abs().max() <= (x.max() - x.min()) / 2 ** (bits + 1) + 1e-12


@given(bits=st.integers(0, 8), seed=st.integers(0, 100))
def test_a_blurred_number_is_off_by_half_a_part_at_most(bits: int, seed: int) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    off = blur_state(x, x.min(), x.max(), bits) - x
    part = (x.max() - x.min()) / 2**bits
    assert off.abs().max() <= part / 2
    assert float(off.var()) == pytest.approx(float(part**2 / 12), rel=0.15)


def test_what_a_blurred_state_lies_beyond_its_range_is_cut_off() -> None:
    low, high = torch.zeros(100), torch.ones(100)
    blurred = blur_state(torch.full((100,), 1e6), low, high, 2)
    assert blurred.max() <= 1 + 1 / 8


def test_the_noise_is_the_same_at_every_call() -> None:
    x, low, high = torch.full((9,), 0.5), torch.zeros(9), torch.ones(9)
    assert blur_state(x, low, high, 1).equal(blur_state(x, low, high, 1))


def test_numbers_that_never_change_and_positions_stay() -> None:
    state = (torch.tensor([1.5]), torch.tensor([7]))
    assert round_state(state, state, state, 0) == state
    assert blur_state(state, state, state, 0) == state


@pytest.fixture(scope="module")
def measured() -> ScoreByBits:
    return measure(ngram_copier(3), Copying(), 4, batches=2)


def test_without_bits_all_answers_are_one(measured: ScoreByBits) -> None:
    assert measured.by_bits[0] <= 1 / 64  # of 64 strings of a batch


def test_with_many_bits_the_score_is_that_of_the_whole_state(measured: ScoreByBits) -> None:
    assert measured.by_bits[16] == measured.whole == 1.0
    assert set(measured.by_bits) == set(BITS)


def test_a_construction_that_holds_four_values_needs_few_bits() -> None:
    """Each of four keys has two signs; what the last tokens were is of no use."""
    found = measure(recall_h3(), AssociativeRecall(), 40, batches=2)
    assert found.by_bits[0] < 0.6
    assert found.needed == 1


def test_a_construction_bears_little_noise_and_not_as_much_as_its_range() -> None:
    """Noise as wide as the range leaves some of the state, unlike rounding to no bits."""
    found = measure(recall_h3(), AssociativeRecall(), 40, batches=2, noise=True)
    assert 0.6 < found.by_bits[0] < 0.95
    assert found.by_bits[8] == found.whole == 1.0


def test_the_numbers_of_the_state_are_counted(measured: ScoreByBits) -> None:
    width = ngram_copier(3).d_model
    assert measured.numbers == 2 * 2 * 5 * width  # two layers; keys and values of BOS, 4 letters


@pytest.mark.parametrize(
    ("by_bits", "needed"),
    [
        ({1: 0.0, 2: 0.5, 4: 0.96, 8: 1.0}, 4),
        ({1: 1.0, 2: 0.5, 4: 0.96, 8: 1.0}, 4),
        ({1: 1.0, 8: 1.0}, 1),
        ({1: 0.0, 8: 0.95}, 8),
        ({1: 0.0, 8: 0.9}, None),
    ],
)
def test_needed_are_the_bits_from_which_on_the_score_holds(
    by_bits: dict[int, float], needed: int | None
) -> None:
    assert ScoreByBits(1, 1.0, by_bits).needed == needed


def test_tasks_that_are_not_decoded_are_refused() -> None:
    with pytest.raises(InputError, match="answered by decoding, such as copying, got 'Flip-flop'"):
        measure(model_of("lstm"), FlipFlop(), 8)


@pytest.mark.parametrize(
    ("length", "batches", "message"),
    [
        (8, 0, "batches must be at least 1, got 0"),
        (1 << 31, 1, "length must be at most 2,147,483,647, got 2147483648"),
    ],
)
def test_no_batch_and_a_length_beyond_memory_are_refused(
    length: int, batches: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        measure(model_of("lstm"), Copying(), length, batches=batches)


def test_mixed_strings_are_measured_at_their_longest() -> None:
    mixed, plain = Copying(max_len=4, mixed=True), Copying(max_len=4)
    found = measure(model_of("attention"), mixed, 4, bits=(16,), batches=1)
    assert found.numbers == measure(model_of("attention"), plain, 4, bits=(), batches=1).numbers
    assert mixed.positions(4) == plain.positions(4)


def test_counters_of_tokens_are_no_memory() -> None:
    model = model_of("lstm attention staircase(sliding_attention(window=4))")
    integers = [
        leaf for leaf in pytree.tree_leaves(model.init_state(1)) if not leaf.is_floating_point()
    ]
    assert len(integers) > 3
    counted = 8 * sum(leaf.numel() * leaf.element_size() for leaf in integers)
    assert state_bits(model, 20) == 8 * model.state_bytes(20) - counted


def test_an_integer_that_depends_on_the_text_is_memory() -> None:
    update, output = torch.tensor([[1, 0], [0, 1]]), torch.tensor([0, 1])
    layer = Automaton(update, output)
    assert state_bits(layer, 5) == 8 * layer.state_bytes(5) > 0


class Own:
    """A task outside the package; the prompts of a batch repeat its number."""

    title, metric = "own", "accuracy"

    def problems(self, length: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        prompts = torch.full((2, length), index)
        return prompts, prompts[:, :1]

    def score(self, answers: torch.Tensor, found: torch.Tensor) -> dict[str, float]:
        return {"accuracy": (answers == found).float().mean().item()}


@pytest.mark.cpu  # its task makes tensors
def test_capacity_is_measured_on_any_task_with_problems() -> None:
    found = measure(model_of("lstm"), Own(), 3, bits=(0,), batches=1)
    assert found.by_bits.keys() == {0}
    assert found.numbers == 16


@pytest.mark.cpu  # its task makes tensors
def test_ranges_are_of_other_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr("stateline.capacity.round_state", lambda *a: given.append(a) or a[0])
    measure(model_of("lstm"), Own(), 3, bits=(0,), batches=1)
    state, low, high = map(pytree.tree_leaves, given[0][:3])
    assert all(map(torch.equal, low, high))  # all rows of the other batch are equal
    assert not all(map(torch.allclose, state, low))
