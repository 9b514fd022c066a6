"""A long text as tokens: documents one after the other, in memory or in files."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int, Integer


class TokenText:
    """Tokens of documents, one after the other, stored in parts.

    Args:
        sizes: Tokens in each part.
        load: Gives a part by its number; called for every read, so it should be quick.
        borders: Where each document begins, and at last where the last one ends.

    Attributes:
        borders: As given.

    Example:
        >>> parts = [np.array([1, 2, 3]), np.array([4, 5])]
        >>> text = TokenText([3, 2], parts.__getitem__, np.array([0, 4, 5]))
        >>> text.read(1, 5)
        array([2, 3, 4, 5])
        >>> text.cut(2).borders, text.joined().borders
        (array([0, 2]), array([0, 5]))
    """

    def __init__(
        self,
        sizes: Sequence[int],
        load: Callable[[int], Integer[np.ndarray, " part"]],
        borders: Int[np.ndarray, " documents_and_1"],
    ) -> None:
        self._ends, self._load = np.cumsum(sizes), load
        self._sizes, self.borders = sizes, borders

    @classmethod
    def of(cls, tokens: Integer[np.ndarray, " length"]) -> "TokenText":
        """A text in memory, as one document."""
        return cls([len(tokens)], lambda _: tokens, np.array([0, len(tokens)]))

    def __len__(self) -> int:
        return int(self.borders[-1])

    def read(self, start: int, stop: int) -> Int[np.ndarray, " length"]:
        """Tokens from ``start`` up to ``stop``, as 64-bit integers."""
        pieces = [np.empty(0, dtype=np.int64)]  # so that the pieces joined are of this type
        part = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin = int(self._ends[part]) - self._sizes[part]
            piece = self._load(part)[start - begin : stop - begin]
            pieces.append(piece)
            start += len(piece)
            part += 1
        return np.concatenate(pieces)

    def cut(self, most: int) -> "TokenText":
        """The first tokens, at most so many."""
        end = min(most, len(self))
        borders = np.append(self.borders[self.borders < end], end)
        return TokenText(self._sizes, self._load, borders)

    def joined(self) -> "TokenText":
        """The same tokens as one document."""
        return TokenText(self._sizes, self._load, self.borders[[0, -1]])
