"""N-gram lookup: find letters in a string and give the letters that follow."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from stateline.errors import InputError, check_choice
from stateline.tasks.synthetic.strings import Examples, Numbers, StringTask

_TRIES = 100
"""Draws after which the search for a string with a unique key is given up."""


@dataclass(eq=False, kw_only=True)
class NgramLookup(StringTask):
    """Find n letters in a string, and give the letters that follow.

    .. code-block:: text

        suffix: example := BOS x SEP key answer EOS
        prefix: example := BOS key SEP x SEP answer EOS

    x is a string of l random letters. The key is an n-gram that occurs in x only once, drawn
    uniformly from the n-grams that enough letters follow. The answer is the ``answer_len``
    letters after the key, or all letters after it. With the key first, a state needs to hold only
    the key and the answer; with the key last, it must hold all of x.

    Differs from the official code, where a key may occur more than once (4 % of the keys of two
    letters, for 26 letters and strings of 30) and is never at the last possible place.

    Args:
        n: Letters of the key.
        key: ``suffix`` (after the string) or ``prefix`` (before it).
        answer_len: Letters to give; ``none`` for all up to the end of the string. A string must
            hold more than key and answer.
        **options: See :class:`~stateline.tasks.StringTask`, which says what rows are.

    Raises:
        InputError: If a size is out of range, the longest example does not fit a row, or no string
            with a unique key is found (only where letters are few and strings are long).

    Example:
        >>> prompts, answers = NgramLookup(n_letters=5).problems(length=6, index=0)
        >>> prompts[0], answers[0]  # BOS is 5, SEP is 6
        (tensor([5, 2, 1, 1, 4, 1, 0, 6, 1, 1]), tensor([4, 1, 0]))

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, section 3.5 and figures 5 and 6.
    """

    title = "N-gram lookup"
    about = (
        "With the key last, a model must keep the whole string to find it; with the key first, it "
        "can wait for the key. A model that solves only the second task lacks memory."
    )

    n: int = 2
    key: Literal["suffix", "prefix"] = "suffix"
    answer_len: int | None = 3
    min_len: int = 8
    max_len: int = 15
    context_len: int = 64

    def __post_init__(self) -> None:
        check_choice("key", self.key, ("suffix", "prefix"))
        self._check_sizes(self.min_len)
        super().__post_init__()

    def _sizes(self) -> tuple[int, int]:
        around = self.n + (3 if self.key == "suffix" else 4)
        answer = self.answer_len or self.max_len - self.n
        return around + self.min_len + (self.answer_len or 1), around + self.max_len + answer

    def _check_sizes(self, length: int) -> None:
        answer_len = 1 if self.answer_len is None else self.answer_len
        if min(self.n, answer_len) < 1 or length < self.n + answer_len:
            raise InputError(
                "n and answer_len must be at least 1, and a string must hold both: got "
                f"n={self.n}, answer_len={self.answer_len} and a length of {length}"
            )

    def _examples(
        self, rng: np.random.Generator, lengths: Int[np.ndarray, "row example"]
    ) -> Examples:
        return self._looked_up(*self._drawn(rng, lengths), lengths)

    def _asked(self, rng: np.random.Generator, lengths: Int[np.ndarray, " row"]) -> Examples:
        self._check_sizes(int(lengths[0]))
        return self._looked_up(*self._drawn(rng, lengths), lengths)

    def _drawn(self, rng: np.random.Generator, lengths: Numbers) -> tuple[Numbers, Numbers]:
        """Draw strings and the places of their keys; redraw strings without a unique key."""
        strings = rng.integers(self.n_letters, size=(*lengths.shape, int(lengths.max())))
        usable = self._usable(strings, lengths)
        for _ in range(_TRIES):
            without = ~usable.any(axis=-1)
            if not without.any():
                return strings, np.where(usable, rng.random(usable.shape), -1).argmax(axis=-1)
            strings[without] = rng.integers(self.n_letters, size=strings[without].shape)
            usable = self._usable(strings, lengths)
        raise InputError(
            f"a string must hold n letters that occur once, and of {_TRIES} none did: raise "
            f"n={self.n} or n_letters={self.n_letters}, or lower the length ({lengths.max()})"
        )

    def _usable(self, strings: Numbers, lengths: Numbers) -> Bool[np.ndarray, "... place"]:
        """Possible places of a key: its letters occur once, and enough letters follow."""
        grams = np.lib.stride_tricks.sliding_window_view(strings, self.n, axis=-1)
        places = np.arange(grams.shape[-2])
        inside = places <= lengths[..., None] - self.n
        # After sorting, equal n-grams are neighbours; those outside the string get unique numbers.
        numbered = _numbers(grams, self.n_letters)
        numbered = np.where(inside, numbered, -1 - places)
        order = numbered.argsort(axis=-1)
        ordered = np.take_along_axis(numbered, order, axis=-1)
        same = ordered[..., 1:] == ordered[..., :-1]
        edge = np.zeros((*same.shape[:-1], 1), dtype=bool)
        repeated = np.empty(numbered.shape, dtype=bool)
        neighbours = np.concatenate([same, edge], axis=-1) | np.concatenate([edge, same], axis=-1)
        np.put_along_axis(repeated, order, neighbours, axis=-1)
        following = 1 if self.answer_len is None else self.answer_len
        return ~repeated & (places <= lengths[..., None] - self.n - following)

    def _looked_up(self, strings: Numbers, places: Numbers, lengths: Numbers) -> Examples:
        """Examples on strings with a key at each place."""
        begin = places + self.n
        answered = lengths - begin
        if self.answer_len is not None:
            answered = np.minimum(answered, self.answer_len)
        key = np.take_along_axis(strings, places[..., None] + np.arange(self.n), axis=-1)
        reach = np.minimum(begin[..., None] + np.arange(answered.max()), strings.shape[-1] - 1)
        answer = np.take_along_axis(strings, reach, axis=-1), answered
        asked, sep = (key, np.full_like(lengths, self.n)), self._special(self.sep, lengths.shape)
        string = strings, lengths
        prompt = [string, sep, asked] if self.key == "suffix" else [asked, sep, string, sep]
        return self._compose(prompt, answer)


def _numbers(grams: Int[np.ndarray, "... n"], n_letters: int) -> Int[np.ndarray, "..."]:
    """A number for each n-gram; equal n-grams have equal numbers."""
    if n_letters ** grams.shape[-1] < 1 << 62:
        return grams @ n_letters ** np.arange(grams.shape[-1])
    _, inverse = np.unique(grams.reshape(-1, grams.shape[-1]), axis=0, return_inverse=True)
    return inverse.reshape(grams.shape[:-1])
