"""Theorem 2.3: a transformer of depth 2 copies all strings but those in which n letters repeat."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from stateline import check_layer, load_model, save_model
from stateline.errors import InputError
from stateline.generate import generate
from stateline.models.constructions import bits_for_half, ngram_copier, ngram_for_error
from stateline.models.constructions.ngram_copier import token_codes
from stateline.models.constructions.zero_model import places


def repeats(letters: Tensor, n: int) -> Tensor:
    """Which strings hold some n letters twice; overlapping ones count."""
    grams = [[tuple(g.tolist()) for g in row.unfold(0, n, 1)] for row in letters]
    return torch.tensor([len(set(row)) < len(row) for row in grams])


@torch.inference_mode()
def copied(n: int, n_letters: int, letters: Tensor) -> Tensor:
    """Which strings greedy decoding copies: those whose every letter follows from the ones before.

    Args:
        n: Of the model.
        n_letters: Of the model.
        letters: Strings of one length.
    """
    model = ngram_copier(n, n_letters=n_letters, longest=max(10, letters.shape[1]))
    tokens = torch.cat([prompts(n_letters, letters), letters[:, :-1]], dim=1)
    predictions = model(tokens)[:, -letters.shape[1] :].argmax(dim=2)
    return (predictions == letters).all(dim=1)


def prompts(n_letters: int, letters: Tensor) -> Tensor:
    """BOS, the string, SEP."""
    bos, sep = (torch.full((len(letters), 1), n_letters + i) for i in range(2))
    return torch.cat([bos, letters, sep], dim=1)


def uniform(n_letters: int, length: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(n_letters, (count, length), generator=generator)


def bound(n: int, n_letters: int, length: int) -> float:
    """On the probability that n letters occur twice: a union over pairs of places."""
    return min(1.0, math.comb(length - n + 1, 2) / n_letters**n)


@pytest.mark.slow
def test_strings_of_200_letters_are_copied_by_5_grams_in_99_percent_of_cases() -> None:
    letters = uniform(26, 200, 400)
    right = copied(5, 26, letters)
    assert right.float().mean() >= 0.99
    assert right[~repeats(letters, 5)].all()


def test_decoding_copies_what_has_no_repeat() -> None:
    letters = uniform(26, 60, 50)
    letters = letters[~repeats(letters, 3)]
    assert generate(ngram_copier(3, longest=60), prompts(26, letters), 60).equal(letters)


@torch.inference_mode()
def test_the_first_layer_writes_keys_and_queries() -> None:
    """Lemma C.4, at every position of a prompt and the copy after it."""
    n, length = 3, 12
    letters = uniform(26, length, 4)
    tokens = torch.cat([prompts(26, letters), letters], dim=1)
    model = ngram_copier(n).double()
    codes = token_codes(26).double()
    d_code = codes.shape[1]
    _, _, keys, queries, _ = places(
        d_code, (n + 1) * d_code, n * (d_code + 1), n * (d_code + 1), d_code
    )
    windows, table, *_ = model.stack.links
    h = table(windows(model.embedding(tokens)))

    sep = length + 1
    for i in range(tokens.shape[1]):
        key, query = (torch.zeros(len(tokens), n, d_code + 1).double() for _ in range(2))
        for t in range(n):
            if i > n:
                key[:, t, :d_code] = codes[tokens[:, i - t - 1]]
            if i >= n and not sep <= i < sep + n:
                query[:, t, :d_code] = codes[tokens[:, i - t]]
            key[:, t, d_code] = i == t + 1
            query[:, t, d_code] = n * (i == sep + t)
        for place, expected in ((keys, key), (queries, query)):
            if i >= n or place is keys:  # nobody asks before
                content, position = h[:, i, place].split([n * d_code, n], dim=1)
                found = torch.cat([content.unflatten(1, (n, d_code)), position[..., None]], dim=2)
                assert (found - expected).abs().max() < 1e-6, i


@pytest.mark.parametrize(
    ("n_letters", "n", "length"),
    [
        (26, 1, 1),
        (26, 1, 8),
        (26, 2, 2),
        (26, 2, 12),
        (26, 3, 50),
        (26, 5, 7),
        (4, 5, 50),
        (3, 5, 20),
    ],
)
def test_only_strings_with_a_repeat_fail(n_letters: int, n: int, length: int) -> None:
    letters = uniform(n_letters, length, 100)
    assert copied(n, n_letters, letters)[~repeats(letters, n)].all()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("n_letters", [2, 3])
def test_every_short_string_without_a_repeat_is_copied(n_letters: int, n: int) -> None:
    for length in range(n, 8):
        letters = torch.tensor(list(itertools.product(range(n_letters), repeat=length)))
        letters = letters[~repeats(letters, n)]
        if len(letters):
            assert copied(n, n_letters, letters).all(), length


@pytest.mark.parametrize(("n_letters", "n", "length"), [(26, 3, 50), (26, 4, 100), (10, 4, 50)])
def test_the_error_is_within_the_bound(n_letters: int, n: int, length: int) -> None:
    letters = uniform(n_letters, length, 400)
    error = 1 - copied(n, n_letters, letters).double().mean()
    expected = bound(n, n_letters, length)
    assert error <= expected + 4 * math.sqrt(expected / 400)
    assert expected <= length**2 * n_letters**-n  # lemma 2.4


def test_a_repeat_can_be_fatal() -> None:
    string = torch.tensor([[0, 1, 2, 3, 0, 1, 4, 5]])  # 0 1 is followed by 2, then by 4
    assert not copied(2, 26, string).any()
    assert copied(3, 26, string).all()


@pytest.mark.parametrize("n_letters", [2, 3, 26, 1000])
def test_codes_of_tokens_are_unit_vectors_apart(n_letters: int) -> None:
    """Lemma C.2: entries of at most 1, products below 1 - 1/d, special tokens orthogonal to all."""
    codes = torch.as_tensor(token_codes(n_letters)).double()
    products = codes @ codes.T
    assert_close(products.diagonal(), torch.ones(n_letters + 2, dtype=torch.float64))
    others = products - products.diag().diag()
    assert codes.abs().max() <= 1
    assert others.max() < 1 - 1 / codes.shape[1]
    assert not others[n_letters:].any()


@pytest.mark.parametrize("length", [8, 64])
def test_eight_bits_of_mantissa_are_enough(length: int) -> None:
    letters = uniform(26, length, 50)
    model = ngram_copier(4, longest=length).bfloat16()
    with torch.inference_mode():
        scores = model(torch.cat([prompts(26, letters), letters[:, :-1]], dim=1))[:, -length:]
    right = (scores.argmax(dim=2) == letters).all(dim=1)
    assert right[~repeats(letters, 4)].all()


def test_its_memory_is_a_logarithm_above_the_bound() -> None:
    """Its cache, over the L log D bits that any copier needs, grows as n, which is log L."""
    shares = []
    for length in (2**6, 2**9, 2**12):
        n = ngram_for_error(length, 0.01)
        cache = ngram_copier(n, longest=length).state_bytes(2 * length + 2) / 4
        shares.append(cache / bits_for_half(length, 26) / n)
    assert max(shares) < 1.5 * min(shares)


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("n_letters", [1, 2, 26, 1000])
def test_the_width_grows_as_n_log_d(n: int, n_letters: int) -> None:
    assert ngram_copier(n, n_letters=n_letters).d_model <= 4 * (n + 1) * (math.log2(n_letters) + 4)


@pytest.mark.cpu
def test_the_copier_can_be_saved_and_loaded(tmp_path: Path) -> None:
    model = ngram_copier(2, n_letters=3, longest=10)
    save_model(model, tmp_path)
    tokens = model.example_input(2, 9)
    assert load_model(tmp_path)(tokens).equal(model(tokens))


def test_it_streams() -> None:
    report = check_layer(ngram_copier(2, n_letters=3, longest=10))
    # Gradients are not asked for: rectifiers stand at their kinks.
    broken = [f.clause for f in report.findings if not f.ok and "gradient" not in f.clause]
    assert not broken, report


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(InputError, match=r"must be at least 1, got n=0"):
        ngram_copier(0)
