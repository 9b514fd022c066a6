"""Theorems of Repeat After Me about copying random strings, as functions."""

import math
from collections.abc import Sequence

from stateline.errors import InputError
from stateline.settings import at_least


def ngram_copy(letters: Sequence[int], n: int) -> list[int]:
    """Copy a string by looking up what followed the last n letters, without a network.

    The copy begins with the first n letters. To extend it, find the first place where its last n
    letters occur in the string, and append the letter after that place. The copy is right if no n
    letters occur twice in the string; it ends early if the last n letters have no successor.

    Raises:
        InputError: If n is below one.

    Example:
        >>> ngram_copy([3, 1, 4, 1, 5], n=2)
        [3, 1, 4, 1, 5]
        >>> ngram_copy([3, 1, 4, 1, 5], n=1)  # 1 occurs twice
        [3, 1, 4, 1, 4]

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, algorithm 1.
    """
    at_least(1, n=n)
    follows: dict[tuple[int, ...], int] = {}
    for end in range(n, len(letters)):
        follows.setdefault(tuple(letters[end - n : end]), letters[end])
    copy = list(letters[:n])
    while len(copy) < len(letters) and (last := tuple(copy[-n:])) in follows:
        copy.append(follows[last])
    return copy


def repeated_ngram_bound(length: int, n: int, n_letters: int = 26) -> float:
    r"""Upper bound on the probability that n letters occur twice in a random string.

    .. math:: \Pr \le \binom{L - n + 1}{2} D^{-n} < L^2 D^{-n}

    Two places have the same n letters with probability :math:`D^{-n}`, also if they overlap: the
    other L - n letters determine the string. The sum over all pairs of places bounds the rest. The
    paper states the last, weaker bound.

    Args:
        length: L, letters per string.
        n: Number of letters.
        n_letters: D, size of the alphabet; all letters are equally likely.

    Example:
        >>> round(repeated_ngram_bound(100, 4), 3)
        0.01

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, lemma 2.4.
    """
    places = max(length - n + 1, 0)
    return min(1.0, math.comb(places, 2) / n_letters**n)


def ngram_for_error(length: int, error: float, n_letters: int = 26) -> int:
    r"""Fewest letters to look up so that copying random strings fails with less than ``error``.

    The paper takes :math:`\lceil \log_D (L^2 / \epsilon) \rceil`, so that a transformer of two
    layers and a width of O(log(L / eps) log D) suffices, see
    :func:`~stateline.models.constructions.ngram_copier`. This is the smallest n for which
    :func:`repeated_ngram_bound` is below the error; it is never larger.

    Args:
        length: L, letters per string.
        error: Error probability that is allowed, above 0.
        n_letters: D, size of the alphabet, at least 2.

    Raises:
        InputError: If the error is not positive, or there is only one letter.

    Example:
        >>> ngram_for_error(1000, 0.01)
        6

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, corollary 2.5.
    """
    if error <= 0 or n_letters < 2:
        raise InputError(
            f"error must be positive and n_letters at least 2, got {error} and {n_letters}"
        )
    n = 1
    while repeated_ngram_bound(length, n, n_letters) >= error:
        n += 1
    return n


def bits_for_half(length: int, n_letters: int = 26) -> float:
    r"""Bits of state below which more than half of all random strings cannot be copied.

    .. math:: \mathrm{mem}(S) < L \log_2 D - 1 \implies \mathrm{error} > 1/2

    Args:
        length: L, letters per string.
        n_letters: D, size of the alphabet; all letters are equally likely.

    Example:
        >>> bits_for_half(8, n_letters=2)
        7.0

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, corollary 2.8.
    """
    return length * math.log2(n_letters) - 1
