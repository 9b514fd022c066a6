"""The theorems on copying, counted over all strings of small sizes."""

import itertools
import math

import pytest
import torch

from stateline.capacity import copy_error_bound
from stateline.errors import InputError
from stateline.generate import generate
from stateline.models.constructions import (
    bits_for_half,
    ngram_copier,
    ngram_copy,
    ngram_for_error,
    repeated_ngram_bound,
)


def repeats(string: tuple[int, ...], n: int) -> bool:
    places = [string[start : start + n] for start in range(len(string) - n + 1)]
    return len(set(places)) < len(places)


@pytest.mark.parametrize(("n_letters", "length"), [(2, 8), (3, 6)])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_bound_on_repeats_holds_over_all_strings(n: int, n_letters: int, length: int) -> None:
    strings = list(itertools.product(range(n_letters), repeat=length))
    share = sum(repeats(string, n) for string in strings) / len(strings)
    bound = repeated_ngram_bound(length, n, n_letters)
    assert 0 < share <= bound <= min(1, length**2 / n_letters**n)


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_every_string_without_a_repeat_is_copied(n: int) -> None:
    strings = list(itertools.product(range(3), repeat=6))
    right = [string for string in strings if ngram_copy(string, n) == list(string)]
    assert {s for s in strings if not repeats(s, n)} <= set(right)
    assert n == 9 or len(right) < len(strings)


def test_the_transformer_of_the_proof_copies_as_the_algorithm_does() -> None:
    model, generator = ngram_copier(2, n_letters=5), torch.Generator().manual_seed(0)
    strings = torch.randint(5, (40, 9), generator=generator)
    clear = [row for row in strings.tolist() if not repeats(tuple(row), 2)]
    assert 5 < len(clear) < 40
    prompts = torch.tensor([[5, *row, 6] for row in clear])
    assert generate(model, prompts, 9).tolist() == [ngram_copy(row, 2) for row in clear]


@pytest.mark.parametrize("error", [0.5, 0.01, 1e-9])
@pytest.mark.parametrize("length", [10, 1000])
def test_the_n_for_an_error_is_the_smallest_and_at_most_the_papers(
    length: int, error: float
) -> None:
    n = ngram_for_error(length, error)
    assert repeated_ngram_bound(length, n) < error
    assert n == 1 or repeated_ngram_bound(length, n - 1) >= error
    assert n <= math.ceil(math.log(length**2 / error, 26))


def test_below_the_bits_for_half_the_error_exceeds_a_half() -> None:
    bits = bits_for_half(20, 26)
    assert copy_error_bound(bits, 20, 26) == pytest.approx(0.5)
    assert copy_error_bound(bits - 0.01, 20, 26) > 0.5


@pytest.mark.parametrize("call", [lambda: ngram_copy([1], 0), lambda: ngram_for_error(9, 0.0)])
def test_a_wrong_size_is_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(InputError):
        call()
