"""Packed rows: rows that hold several documents, each read as if it stood in a row of its own.

Layers whose kernels reset the state at each document take ``starts`` themselves. For all other
layers, this module alone reads packed rows. It cuts the documents out and makes them the rows of
batches of similar lengths, padded at the end; the layer reads these batches like any others, and
its outputs go back to their places. So a document cannot see its neighbour,
whatever the layer keeps between positions, and short documents cost attention less than long rows
do.
"""

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from stateline.errors import InputError
from stateline.layers.state import State, cat_states, replace_rows, select_rows, shown

CALL = 128
"""One call of a layer costs about as much as this number of tokens; batches are chosen by it."""

Numbers = Int[np.ndarray, " n"]


class Documents:
    """Where the documents of packed rows begin, and how they are arranged as batches.

    A row's first document begins at its first position, where a state may continue it: see
    :meth:`SequenceLayer.forward_chunk`.

    Args:
        starts: True at the first position of each document.
        device: Where the layers compute.

    Attributes:
        starts: The argument of this name, on the CPU.
        mask: The same on the device of the layers, for kernels that reset the state at documents.
        longest: Length of the longest document.
    """

    def __init__(
        self, starts: Bool[Tensor, "batch length"], device: torch.device | str = "cpu"
    ) -> None:
        self.starts, self.device = starts.cpu(), torch.device(device)
        self.mask = starts.to(self.device)
        begins = self.starts.numpy().copy()
        begins[:, 0] = True
        self._starts_of_pieces = np.flatnonzero(begins)
        self._lengths = np.diff(self._starts_of_pieces, append=begins.size)
        self._rows, places = np.divmod(self._starts_of_pieces, begins.shape[1])
        self._first = places == 0
        self._last = np.append(self._first[1:], True)
        self.longest = int(self._lengths.max())

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(cls, starts: "Tensor | Documents", x: Tensor) -> "Documents":
        """The documents of an input, from the mask of its starts.

        Raises:
            InputError: If there is no such mask for the input.
        """
        if isinstance(starts, Documents):
            return starts
        fits = isinstance(starts, Tensor) and starts.dtype == torch.bool
        if not fits or starts.shape != x.shape[:2]:
            raise InputError(
                "starts must be true at the first position of each document, a bool tensor of "
                f"shape {tuple(x.shape[:2])} as the input, got {shown(starts)}"
            )
        return cls(starts, x.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def cut(self, start: int, length: int) -> "Documents":
        """The documents of some positions of every row."""
        return Documents(self.starts[:, start : start + length], self.device)

    @property
    def apart(self) -> bool:
        """Whether every row is one document."""
        return len(self._rows) == len(self.starts)

    @cached_property
    def positions(self) -> Int[Tensor, "batch length"]:
        """Position of each token in its document; in a row's first document, in that row."""
        flat = np.arange(self.starts.numel())
        flat -= np.repeat(self._starts_of_pieces, self._lengths)
        return torch.from_numpy(flat.reshape(self.starts.shape)).to(self.device)

    @cached_property
    def continued(self) -> Bool[Tensor, "batch length"]:
        """Whether a token belongs to the document that the incoming state continues."""
        return (self.starts.cumsum(1) == 0).to(self.device)

    @cached_property
    def whole(self) -> "Layout":
        """All documents, to be read from the initial state."""
        return Layout(self, self._batches(np.arange(len(self._rows)), pad=True))

    @cached_property
    def with_states(self) -> "Layout":
        """First documents that continue a state, then documents that leave one, then all others.

        Batches of documents that leave a state have no padding, which would change the state.
        """
        continues = self._first & ~self._last & ~self.starts[:, 0].numpy()[self._rows]
        kinds = (continues, self._last, ~(continues | self._last))
        batches = [
            batch._replace(kind=kind)
            for kind, chosen in enumerate(kinds)
            for batch in self._batches(np.flatnonzero(chosen), pad=kind != LEAVES_A_STATE)
        ]
        return Layout(self, batches)

    def _batches(self, pieces: Numbers, *, pad: bool) -> list["_Batch"]:
        """Documents in batches of similar lengths, or of one length."""
        order = pieces[np.argsort(self._lengths[pieces], kind="stable")]
        lengths, counts = np.unique(self._lengths[order], return_counts=True)
        ends = np.cumsum(counts)
        borders = _borders(lengths, ends) if pad else np.arange(len(lengths) + 1)
        bounds = np.append(0, ends)[borders]
        return [_Batch(order[a:b], int(self._lengths[order[b - 1]])) for a, b in pairwise(bounds)]


def mask_of(documents: Documents | None) -> Bool[Tensor, "batch length"] | None:
    """The mask for kernels that take ``starts``."""
    return None if documents is None else documents.mask


def count_positions(
    before: Int[Tensor, " batch"], x: Tensor, documents: Documents | None
) -> tuple[Int[Tensor, "batch length"], Int[Tensor, " batch"]]:
    """Position of each token of x in its document, and the next position of each row.

    Args:
        before: Number of tokens that came before, in the document that a row begins with.
        x: Input (batch, length, ...).
        documents: Where documents begin; ``None`` if every row continues one.
    """
    positions = before[:, None] + torch.arange(x.shape[1], device=x.device)
    if documents is not None:
        positions = torch.where(documents.continued, positions, documents.positions)
    return positions, positions[:, -1] + 1 if x.shape[1] else before


CONTINUES, LEAVES_A_STATE, STANDS_ALONE = range(3)


class _Batch(NamedTuple):
    """Numbers of documents, and the length to which they are padded."""

    pieces: Numbers
    width: int
    kind: int = STANDS_ALONE


class Group(NamedTuple):
    """A batch of documents as the layer reads it.

    Attributes:
        lengths: Length of each document.
        rows: The packed row of each.
        sources: Row of each document's state in the given states followed by the initial states.
        size: Number of documents, and the length to which they are padded.
        kind: What happens to their states.
    """

    lengths: Int[Tensor, " n"]
    rows: Int[Tensor, " n"]
    sources: Int[Tensor, " n"]
    size: tuple[int, int]
    kind: int


class Layout:
    """Documents arranged as batches: where each token of packed rows goes, and the way back."""

    def __init__(self, documents: Documents, batches: list[_Batch]) -> None:
        device, places = documents.device, list[np.ndarray]()
        self.groups = list[Group]()
        for pieces, width, kind in batches:
            lengths, rows = documents._lengths[pieces], documents._rows[pieces]
            offsets = np.arange(width)
            tokens = documents._starts_of_pieces[pieces, None] + offsets
            places.append(np.where(offsets < lengths[:, None], tokens, -1).ravel())
            goes_on = documents._first[pieces] & ~documents.starts[:, 0].numpy()[rows]
            sources = rows + np.where(goes_on, 0, len(documents.starts))
            own = [torch.from_numpy(part).to(device) for part in (lengths, rows, sources)]
            self.groups.append(Group(own[0], own[1], own[2], (len(pieces), width), kind))
        there = np.concatenate(places)
        back = np.empty(documents.starts.numel(), dtype=np.int64)
        (real,) = np.nonzero(there >= 0)
        back[there[real]] = real
        missing = torch.from_numpy(np.flatnonzero(there < 0)).to(device)
        self.there = _Index(torch.from_numpy(np.maximum(there, 0)).to(device), missing)
        self.back = _Index(torch.from_numpy(back).to(device), missing[:0])

    def apply(self, x: Tensor, read: Callable[[Group, Tensor], Tensor]) -> Tensor:
        """Cut packed rows into batches, read each of them, and join the outputs."""
        moved = _Take.apply(x.flatten(0, 1), self.there, self.back)
        parts = moved.split([n * width for n, width in (group.size for group in self.groups)])
        outputs = [
            read(group, part.unflatten(0, group.size)).flatten(0, 1)
            for group, part in zip(self.groups, parts, strict=True)
        ]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _Take.apply(y, self.back, self.there).unflatten(0, x.shape[:2])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def read(
    layer: Any, own: Callable[..., Any], x: Tensor, documents: Documents, **options: Any
) -> Tensor:
    """Outputs of a layer for packed rows: each document is read from the initial state.

    Args:
        layer: The layer.
        own: Its ``forward`` that takes documents, if it does.
        x: Packed rows.
        documents: The documents in them.
        **options: Options of ``forward``.
    """
    if documents.apart:
        return layer.forward(x, **options)
    if layer.resets and layer.resets(x):
        return own(layer, x, starts=documents, **options)

    def outputs(group: Group, rows: Tensor) -> Tensor:
        lengths = () if layer.causal else (group.lengths,)
        return layer.forward(rows, *lengths, **options)

    return documents.whole.apply(x, outputs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def read_chunk(
    layer: Any,
    own: Callable[..., Any],
    x: Tensor,
    state: State,
    documents: Documents,
    **options: Any,
) -> tuple[Tensor, State]:
    """Outputs for packed rows that a state continues, and the state after the last documents."""
    if not documents.starts.any():
        return layer.forward_chunk(x, state, **options)
    if layer.resets and layer.resets(x, state):
        return own(layer, x, state, starts=documents, **options)
    # Initial states get as much room as the given state: callers may continue in place.
    states = cat_states([state, layer.init_state(len(x))])
    begun = select_rows(states, range(len(x), 2 * len(x)))
    if documents.apart:
        fresh = documents.starts[:, 0].to(x.device)
        return layer.forward_chunk(x, replace_rows(state, fresh, begun), **options)
    left: list[tuple[Tensor, State]] = []

    def outputs(group: Group, rows: Tensor) -> Tensor:
        if group.kind == STANDS_ALONE:
            return layer.forward(rows, **options)
        y, after = layer.forward_chunk(rows, select_rows(states, group.sources), **options)
        if group.kind == LEAVES_A_STATE:
            left.append((group.rows, after))
        return y

    y = documents.with_states.apply(x, outputs)
    rows, after = zip(*left, strict=True)
    return y, select_rows(cat_states(after), torch.cat(rows).argsort())


class _Index(NamedTuple):
    """Places to take rows from, and the rows of the result that have no such place."""

    places: Int[Tensor, " n"]
    missing: Int[Tensor, " m"]


class _Take(torch.autograd.Function):
    """Gather rows. Each row except padding is gathered once, so the gradient is a gather, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Index, back: _Index) -> Tensor:
        ctx.ways = there, back
        y = x.index_select(0, there.places)
        return y.index_fill_(0, there.missing, 0) if len(there.missing) else y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        there, back = ctx.ways
        return _Take.apply(gradient, back, there), None, None


def _borders(lengths: Numbers, ends: Numbers) -> Int[np.ndarray, " batches_and_1"]:
    """Cut documents, sorted by length, into batches of least cost.

    The cost of a batch is its number of tokens, padding included, plus ``CALL``.

    Args:
        lengths: The lengths that occur, increasing.
        ends: For each length, the number of documents of at most this length.

    Returns:
        Index of the first length of each batch, and finally the number of lengths.
    """
    before = np.append(0, ends)
    cost, cut = np.zeros(len(before)), np.zeros(len(before), dtype=np.int64)
    for stop in range(1, len(before)):
        costs = cost[:stop] + lengths[stop - 1] * (before[stop] - before[:stop])
        cut[stop] = costs.argmin()
        cost[stop] = costs[cut[stop]] + CALL
    borders = [len(lengths)]
    while borders[-1]:
        borders.append(int(cut[borders[-1]]))
    return np.array(borders[::-1])
