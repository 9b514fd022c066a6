"""Rows of a text: segments of documents, packed documents, or a stream of all documents."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int

from stateline.data.token_text import TokenText
from stateline.tasks.base import IGNORE, Batch, ConsecutiveBatch, PackedBatch

Numbers = Int[np.ndarray, " n"]


class Segments:
    """Documents cut into segments of one length, starting at the beginning of each.

    A segment is defined by its targets. The first token of a document is not a target, so a
    document of ``length + 1`` tokens has one segment.

    Args:
        begins: Index of the first token of each document.
        ends: Index after the last token of each document.
        length: Tokens in a segment.

    Attributes:
        full: Number of segments for training: all of them.

    Example:
        >>> segments = Segments(np.array([0, 7]), np.array([7, 10]), 4)
        >>> segments.places(np.arange(len(segments)))  # starts, stops, whether a document begins
        (array([0, 4, 7]), array([4, 6, 9]), array([ True, False,  True]))
    """

    def __init__(self, begins: Numbers, ends: Numbers, length: int) -> None:
        self.begins, self.ends, self.length = begins, ends, length
        counts = np.maximum(-((begins + 1 - ends) // length), 0)
        self.before = np.append(0, np.cumsum(counts))
        self.full = int(self.before[-1])

    def __len__(self) -> int:
        return self.full

    def places(self, numbers: Numbers) -> tuple[Numbers, Numbers, Bool[np.ndarray, " n"]]:
        """Start and end of the segments with these numbers, and whether each begins a document."""
        document = np.searchsorted(self.before, numbers, side="right") - 1
        nth = numbers - self.before[document]
        starts = self.begins[document] + nth * self.length
        return starts, np.minimum(starts + self.length, self.ends[document] - 1), nth == 0

    def read(self, text: TokenText, numbers: Numbers) -> Batch:
        """The segments with these numbers, each from an empty state."""
        return windows(text, *self.places(numbers)[:2], self.length)

    def read_on(self, text: TokenText, numbers: Numbers, *, begun: bool) -> ConsecutiveBatch:
        """Segments that continue the previous ones, unless ``begun``; empty after the last one."""
        starts, stops, first = self.places(np.minimum(numbers, len(self) - 1))
        tokens, targets = windows(
            text, starts, np.where(numbers < len(self), stops, starts), self.length
        )
        return ConsecutiveBatch(tokens, targets, torch.from_numpy(first | begun))


class Window(NamedTuple):
    """Consecutive tokens of a document in a row.

    Attributes:
        place: Position in the row.
        start: Index of the first token in the text.
        stop: Index after the last input token: the index of the last target.
        begins: Whether it is read from an empty state.
    """

    place: int
    start: int
    stop: int
    begins: bool


class PackedRows:
    """Segments in as few rows as best fit finds, each read from an empty state.

    Longest first, each segment goes into the row with the least free space that suffices. The rows
    are always the same, so their numbers identify a batch.

    Example:
        >>> len(PackedRows(Segments(np.array([0, 4, 7]), np.array([4, 7, 9]), length=4)))
        2
    """

    def __init__(self, segments: Segments) -> None:
        starts, stops, _ = segments.places(np.arange(len(segments)))
        row = best_fit(stops - starts, segments.length)
        order = np.argsort(row, kind="stable")
        self.length, self._starts, self._stops = segments.length, starts[order], stops[order]
        self._ends = np.cumsum(np.bincount(row))

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, text: TokenText, numbers: Numbers) -> PackedBatch:
        """The rows with these numbers."""
        return packed_batch(text, map(self._pieces, numbers.tolist()), self.length)

    def _pieces(self, row: int) -> list[Window]:
        own = slice(self._ends[row - 1] if row else 0, self._ends[row])
        starts, stops = self._starts[own], self._stops[own]
        places = np.cumsum(stops - starts) - (stops - starts)
        columns = (column.tolist() for column in (places, starts, stops))
        return [Window(place, a, b, True) for place, a, b in zip(*columns, strict=True)]


class Stream:
    """All documents one after the other, in rows of one length; each row continues the last one.

    The last token of a document is only a target, and the first token only an input.

    Args:
        begins: Index of the first token of each document.
        ends: Index after its last token.
        length: Positions in a row.

    Attributes:
        full: Number of rows without an empty position.
    """

    def __init__(self, begins: Numbers, ends: Numbers, length: int) -> None:
        long = ends - begins > 1
        self.begins, self.length = begins[long], length
        self.before = np.append(0, np.cumsum(ends[long] - self.begins - 1))
        self.full = int(self.before[-1]) // length

    def __len__(self) -> int:
        return -(-int(self.before[-1]) // self.length)

    def read_on(self, text: TokenText, numbers: Numbers, *, begun: bool) -> PackedBatch:
        """The rows with these numbers; with ``begun``, each starts from an empty state."""
        batch = packed_batch(text, map(self._pieces, numbers.tolist()), self.length)
        batch.starts[:, 0] |= begun
        return batch

    def _pieces(self, row: int) -> list[Window]:
        start, stop = row * self.length, min((row + 1) * self.length, int(self.before[-1]))
        if start >= stop:
            return []
        first, last = np.searchsorted(self.before, [start, stop - 1], side="right") - 1
        found = []
        for document in range(first, last + 1):
            before, after = self.before[document : document + 2].tolist()
            a, b = max(before, start), min(after, stop)
            shift = int(self.begins[document]) - before
            found.append(Window(a - start, a + shift, b + shift, a == before))
        return found


def packed_batch(text: TokenText, pieces: Iterable[list[Window]], length: int) -> PackedBatch:
    """Packed rows of a text; padding at the end of a row is a document without targets."""
    rows = list(pieces)
    tokens = np.zeros((len(rows), length), dtype=np.int64)
    targets = np.full_like(tokens, IGNORE)
    starts: Bool[np.ndarray, "rows length"] = np.zeros(tokens.shape, dtype=bool)
    for row, held in enumerate(rows):
        stop = 0
        for place, begin, end, begins in held:
            stop, read = place + end - begin, text.read(begin, end + 1)
            tokens[row, place:stop] = read[:-1]
            targets[row, place:stop] = np.where(text.asked(begin + 1, end + 1), read[1:], IGNORE)
            starts[row, place] = begins
        starts[row, stop : stop + 1] = True
    return PackedBatch(*map(torch.from_numpy, (tokens, targets, starts)))


def windows(text: TokenText, starts: Numbers, stops: Numbers, length: int) -> Batch:
    """Tokens from each start up to each stop, padded to one length, and their next tokens."""
    places = zip(starts.tolist(), stops.tolist(), strict=True)
    rows = ([Window(0, start, stop, True)] for start, stop in places)
    return Batch(*packed_batch(text, rows, length)[:2])


def best_fit(lengths: Numbers, size: int) -> Numbers:
    """Row of each piece: longest first, each goes into the fullest row that it fits into.

    Example:
        >>> best_fit(np.array([2, 4, 3, 3, 1]), 5)
        array([2, 0, 1, 2, 0])
    """
    rows, count = np.empty(len(lengths), dtype=np.int64), 0
    by_free = [list[int]() for _ in range(size)]
    sizes = 0  # bit n is set if some row has n free positions
    for piece in np.argsort(-lengths, kind="stable").tolist():
        needed = int(lengths[piece])
        if large := sizes >> needed:
            free = needed + (large & -large).bit_length() - 1
            row = by_free[free].pop()
            sizes ^= 0 if by_free[free] else 1 << free
        else:
            free, row, count = size, count, count + 1
        rows[piece] = row
        if left := free - needed:
            by_free[left].append(row)
            sizes |= 1 << left
    return rows
