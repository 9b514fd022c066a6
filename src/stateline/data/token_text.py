"""The tokens of a sequence of documents, in memory or in files."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int, Integer


class TokenText:
    """The concatenated tokens of documents, stored in parts.

    Args:
        sizes: Number of tokens in each part.
        load: Returns a part, given its number. Every read calls it, so it should be fast.
        borders: Index of the first token of each document, and finally the total number of tokens.

    Attributes:
        borders: The argument of this name.

    Example:
        >>> parts = [np.array([1, 2, 3]), np.array([4, 5])]
        >>> text = TokenText([3, 2], parts.__getitem__, np.array([0, 4, 5]))
        >>> text.read(1, 5)
        array([2, 3, 4, 5])
        >>> text.cut(2).borders, text.after(2).borders, text.joined().borders
        (array([0, 2]), array([2, 4, 5]), array([0, 5]))
    """

    def __init__(
        self,
        sizes: Sequence[int],
        load: Callable[[int], Integer[np.ndarray, " part"]],
        borders: Int[np.ndarray, " documents_and_1"],
    ) -> None:
        self._ends, self._load = np.cumsum(sizes), load
        self._sizes, self.borders = sizes, borders

    def __len__(self) -> int:
        return int(self.borders[-1])

    def read(self, start: int, stop: int) -> Int[np.ndarray, " length"]:
        """Return the tokens from ``start`` up to, not including, ``stop`` as 64-bit integers."""
        pieces = [np.empty(0, dtype=np.int64)]  # makes the result int64
        part = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin = int(self._ends[part]) - self._sizes[part]
            piece = self._load(part)[start - begin : stop - begin]
            pieces.append(piece)
            start += len(piece)
            part += 1
        return np.concatenate(pieces)

    def asked(self, start: int, stop: int) -> Bool[np.ndarray, " length"]:
        """Whether each of these tokens, all of one document, is a target: by default all are."""
        return np.ones(stop - start, dtype=bool)

    def cut(self, most: int) -> "TokenText":
        """Return the first ``most`` tokens, or all if there are fewer."""
        end = min(most, len(self))
        borders = np.append(self.borders[self.borders < end], end)
        return TokenText(self._sizes, self._load, borders)

    def after(self, start: int) -> "TokenText":
        """Return the tokens at positions ``start`` and later; positions stay the same."""
        borders = np.append(start, self.borders[self.borders > start])
        return TokenText(self._sizes, self._load, borders)

    def joined(self) -> "TokenText":
        """Return the same tokens as a single document."""
        return TokenText(self._sizes, self._load, self.borders[[0, -1]])
