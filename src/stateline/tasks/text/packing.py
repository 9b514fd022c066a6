"""Rows that hold several documents: packed by best fit, or cut from all documents one by one."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int

from stateline.data.token_text import TokenText
from stateline.tasks.base import IGNORE, PackedBatch

Numbers = Int[np.ndarray, " n"]


class Piece(NamedTuple):
    """Consecutive tokens of a document in a packed row.

    Attributes:
        place: Position in the row.
        start: Index of the first token in the text.
        stop: Index after the last token that is read; this one is the last target.
        begins: Whether it is read from an empty state.
    """

    place: int
    start: int
    stop: int
    begins: bool


class PackedRows:
    """Pieces of documents in as few rows as best fit finds, each piece read from an empty state.

    Longest first, each piece goes into the row with the least room that suffices. The rows are
    always the same, so a batch of them is known by their numbers.

    Args:
        starts: Index of the first token of each piece in the text.
        stops: Index of its last target.
        length: Positions in a row; no piece is longer.

    Example:
        >>> len(PackedRows(starts=np.array([0, 4, 7]), stops=np.array([3, 6, 8]), length=4))
        2
    """

    def __init__(self, starts: Numbers, stops: Numbers, length: int) -> None:
        row = best_fit(stops - starts, length)
        order = np.argsort(row, kind="stable")
        self._starts, self._stops = starts[order], stops[order]
        self._ends = np.cumsum(np.bincount(row))

    def __len__(self) -> int:
        return len(self._ends)

    def pieces(self, row: int) -> list[Piece]:
        """What a row holds, from its first position."""
        own = slice(self._ends[row - 1] if row else 0, self._ends[row])
        starts, stops = self._starts[own], self._stops[own]
        places = np.cumsum(stops - starts) - (stops - starts)
        columns = (column.tolist() for column in (places, starts, stops))
        return [Piece(place, a, b, True) for place, a, b in zip(*columns, strict=True)]


class Stream:
    """All documents one after the other, in pieces of any places: a row goes on where it ended.

    The last token of a document is a target alone, and the first one an input alone.

    Args:
        begins: Index of the first token of each document.
        ends: Index after its last token.
    """

    def __init__(self, begins: Numbers, ends: Numbers) -> None:
        long = ends - begins > 1
        self.begins = begins[long]
        self.before = np.append(0, np.cumsum(ends[long] - self.begins - 1))

    def __len__(self) -> int:
        return int(self.before[-1])

    def pieces(self, start: int, length: int) -> list[Piece]:
        """What a row holds that reads ``length`` inputs from ``start``, or as many as there are."""
        stop = min(start + length, len(self))
        if start >= stop:
            return []
        first, last = np.searchsorted(self.before, [start, stop - 1], side="right") - 1
        found = []
        for document in range(first, last + 1):
            before, after = self.before[document : document + 2].tolist()
            a, b = max(before, start), min(after, stop)
            shift = int(self.begins[document]) - before
            found.append(Piece(a - start, a + shift, b + shift, a == before))
        return found


def packed_batch(text: TokenText, pieces: Iterable[list[Piece]], length: int) -> PackedBatch:
    """Packed rows of a text; padding at the end of a row is a document without targets."""
    rows = list(pieces)
    tokens = np.zeros((len(rows), length), dtype=np.int64)
    targets = np.full_like(tokens, IGNORE)
    starts: Bool[np.ndarray, "rows length"] = np.zeros(tokens.shape, dtype=bool)
    for row, held in enumerate(rows):
        stop = 0
        for place, begin, end, begins in held:
            stop = place + end - begin
            tokens[row, place:stop], targets[row, place:stop] = read_window(text, begin, end)
            starts[row, place] = begins
        starts[row, stop : stop + 1] = True
    return PackedBatch(*map(torch.from_numpy, (tokens, targets, starts)))


def read_window(text: TokenText, start: int, stop: int) -> tuple[Numbers, Numbers]:
    """Tokens from ``start`` up to ``stop``, and of each the next one, if that is a target."""
    tokens = text.read(start, stop + 1)
    return tokens[:-1], np.where(text.asked(start + 1, stop + 1), tokens[1:], IGNORE)


def best_fit(lengths: Numbers, size: int) -> Numbers:
    """Row of each piece: longest first, each into the fullest row that has room for it.

    Example:
        >>> best_fit(np.array([2, 4, 3, 3, 1]), 5)
        array([2, 0, 1, 2, 0])
    """
    rows, count = np.empty(len(lengths), dtype=np.int64), 0
    by_room = [list[int]() for _ in range(size)]
    rooms = 0  # bit r is set if some row has room for r more positions
    for piece in np.argsort(-lengths, kind="stable").tolist():
        needed = int(lengths[piece])
        if large := rooms >> needed:
            room = needed + (large & -large).bit_length() - 1
            row = by_room[room].pop()
            rooms ^= 0 if by_room[room] else 1 << room
        else:
            room, row, count = size, count, count + 1
        rows[piece] = row
        if left := room - needed:
            by_room[left].append(row)
            rooms |= 1 << left
    return rows
