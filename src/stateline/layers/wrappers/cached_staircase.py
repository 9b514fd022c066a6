"""Cached Staircase: a staircase with a cache of the outputs of the last pass."""

import math
from collections import deque
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import AnyLayer, SequenceLayer, zeros
from stateline.layers.compose import ActivationCheckpointing
from stateline.layers.context import Context, mean_visible
from stateline.layers.wrappers.context_links import context_links
from stateline.layers.wrappers.staircase import by_phase, climb, cut
from stateline.ops.attention import check_room
from stateline.settings import Count, Size

Contexts = tuple[Context, ...]
"""Keys and values for each link that attends."""


class CachedStaircaseState(NamedTuple):
    """Number of tokens of each row, the cache, and the context of each pass in live chunks.

    The last slot holds the last token; in rows with fewer tokens, the first slots are free.
    """

    length: Int[Tensor, " batch"]
    cache: Contexts
    live: tuple[Contexts, ...]


class GlobalCachedStaircaseState(NamedTuple):
    """State of a staircase whose cache holds every token."""

    length: Int[Tensor, " batch"]
    cache: Contexts
    live: tuple[Contexts, ...]

    @staticmethod
    def trim(state: "GlobalCachedStaircaseState") -> "GlobalCachedStaircaseState":
        """Drop the slots that no row has filled."""
        slots, used = state.cache[0].slots, int(state.length.max()) if len(state.length) else 0
        return state._replace(cache=tuple(its.part(slots - used, slots) for its in state.cache))


State = CachedStaircaseState | GlobalCachedStaircaseState


class CachedStaircase(ActivationCheckpointing, SequenceLayer[State]):
    r"""A staircase that attends to the final outputs of chunks that have left it.

    Chunk i is computed in M = ``passes`` wavefronts, as in a staircase, and then stays visible for
    N - M more: every layer of the core sees the same final vectors :math:`h_j^M` through its own
    keys and values. Pass n of chunk i sees its own chunk causally, and

    .. math::
        h_j^{n+i-j} \;\; (i - M + n \le j < i), \qquad
        h_j^M \;\; (i - N + n \le j < i - M + n)

    where N = ``steps``. So every layer sees the output of the last layer at earlier chunks, not its
    own level. With M = N nothing is cached: that is the plain staircase. With ``steps=none`` chunks
    stay visible forever: the Global Cached Staircase.

    With ``passes=0`` the memory is the input: a chunk makes one pass, and sees the vectors
    :math:`h_j^0 = x_j` of earlier chunks in every layer. With ``chunk_len=1, steps=none`` this is
    an end-to-end memory network.

    The core must consist of attention and feed-forwards, in stacks and ladders, since it gets keys
    and values from outside (:mod:`stateline.layers.context`). A final vector is projected
    once per layer.

    Cost: M passes per token, in T / C + M - 1 sequential core calls (C = ``chunk_len``). The state
    has a constant size: keys and values of N C cached and M (M + 1) C / 2 live tokens per layer.
    With ``steps=none`` the cache grows by every token.

    ``forward_chunk`` and ``step`` read on the host where each row is in its chunk: under
    ``torch.compile``, only ``forward`` is a single graph.

    Differs from official training, which finishes the chunks in flight at the end of a segment, so
    that the next segment sees only their final vectors. Here, the division into segments does not
    change the result. Before the first chunk there is no context, rather than visible zeros.

    Args:
        core: Attention and feed-forwards.
        passes: Number of passes of a chunk through the core, M.
        chunk_len: Number of tokens in a chunk, C.
        steps: Number of wavefronts for which a chunk is visible, N; ``None`` for no limit.

    Raises:
        InputError: If the core has layers that cannot attend to a context, or a number does not
            fit.

    References:
        Ju et al., "Staircase Attention for Recurrent Processing of Sequences", 2021, sections
        3.2.2 and 3.2.3.
    """

    def __init__(
        self, core: AnyLayer, *, passes: Size = 1, chunk_len: Count = 4, steps: Count | None = 16
    ) -> None:
        super().__init__(core.d_model)
        self._links = context_links("cached_staircase", core)
        self._attending = [link for link in self._links if link.attends]
        if steps is not None and steps < passes:
            raise InputError(f"steps must be at least passes, got {steps=} and {passes=}")
        self.core, self.passes, self.chunk_len, self.steps = core, passes, chunk_len, steps

    def init_state(self, batch_size: int, *, capacity: int = 0) -> State:
        """Empty contexts; an unlimited cache gets ``capacity`` free slots."""
        state = self._blank(batch_size)
        slots = capacity if self.steps is None else self._kept
        return state._replace(
            cache=tuple(context.with_slots(slots) for context in state.cache),
            live=self._fitted(state.live),
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self._advance(x, self._blank(len(x)), 0)[0]

    @override
    def forward_chunk(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Finish the current chunk, run whole chunks, and start the next one."""
        if not x.shape[1]:
            return x, state
        return by_phase(self._advance, x, state, state.length % self.chunk_len)

    @override
    def step_(self, x: Tensor, state: State) -> Tensor:
        """Run all passes of one token in place; the slots move by one."""
        if self.steps is None:
            check_room(state.length, state.cache[0].slots)
        y, after = self.step(x, state)
        for old, new in zip(pytree.tree_leaves(state), pytree.tree_leaves(after), strict=True):
            old.copy_(new[:, -old.shape[1] :] if old.ndim > 1 else new)
        return y

    def flops_per_token(self, length: int) -> float:
        """Operations of the core in each pass, and of projecting the final vectors.

        Pass n sees N - n earlier chunks, and its own chunk causally.
        """
        chunk_len = min(self.chunk_len, length)
        chunks, steps = length / chunk_len, math.inf if self.steps is None else self.steps
        own = (chunk_len + 1) / 2
        flops = 0.0
        for n in range(1, self._runs + 1):
            earlier = chunk_len * mean_visible(chunks, steps - n)
            for link in self._links:
                flops += link.attend_flops(partial(min, earlier), own)
        return flops + sum(link.context_flops() for link in self._attending)

    @property
    def _runs(self) -> int:
        """Calls of the core for each chunk."""
        return max(self.passes, 1)

    @property
    def _kept(self) -> int:
        """Slots of a limited cache: visible to the first pass, or of the current chunk."""
        assert self.steps is not None
        return self.steps * self.chunk_len if self.steps > self._runs else 0

    def _blank(self, batch_size: int) -> State:
        """State without tokens and without slots."""
        x = zeros(next(self.parameters()), batch_size, 0, self.d_model)
        positions = torch.zeros(batch_size, 0, dtype=torch.int64, device=x.device)
        contexts = tuple(link.project(x, positions) for link in self._attending)
        length = torch.zeros(batch_size, dtype=torch.int64, device=x.device)
        kind = GlobalCachedStaircaseState if self.steps is None else CachedStaircaseState
        return kind(length, contexts, (contexts,) * self._runs)

    def _fitted(self, live: tuple[Contexts, ...]) -> tuple[Contexts, ...]:
        """Give each pass the number of slots that it needs at any phase."""
        return tuple(
            tuple(context.with_slots((self._runs - n) * self.chunk_len) for context in contexts)
            for n, contexts in enumerate(live)
        )

    def _advance(self, x: Tensor, state: State, phase: int) -> tuple[Tensor, State]:
        """Run the wavefronts of an input whose rows are all at the same offset in their chunks.

        As in a staircase, wavefront s continues from the context of pass s + 1 in live chunks. Its
        last ``behind`` tokens are live; cached tokens come before them.
        """
        chunks = cut(x, self.chunk_len, phase)
        starts = [0, *accumulate(c.shape[1] for c in chunks)]
        done = state.cache
        after: deque[Contexts] = deque(maxlen=self._runs)

        def wavefront(s: int, h: Tensor) -> Tensor:
            nonlocal done
            oldest = max(0, s - self._runs + 1)
            start = state.length + starts[oldest]
            positions = start[:, None] + torch.arange(h.shape[1], device=h.device)
            behind = max(0, (self._runs - 1 - s) * self.chunk_len + phase * (s < self._runs))
            context = self._visible(done, behind)
            if behind:
                live = (its.part(its.slots - behind, its.slots) for its in state.live[s])
                context = tuple(a.then(b) for a, b in zip(context, live, strict=True))
            y, seen = self.run(self._cross, h, positions, context, start)
            hidden = context[0].slots - behind
            after.append(tuple(its.part(hidden, its.slots) for its in seen))
            if s >= self._runs - 1:
                final = slice(0, chunks[oldest].shape[1])
                kept = y if self.passes else h
                done = self._remember(done, kept[:, final], positions[:, final])
            return y

        y = climb(chunks, self._runs, wavefront)
        live = tuple(after)
        if (phase + x.shape[1]) % self.chunk_len == 0:
            live = (*live[1:], self._blank(len(x)).cache)
        length = state.length + x.shape[1]
        return y, type(state)(length, done, self._fitted(live))

    def _cross(
        self, h: Tensor, positions: Tensor, contexts: Contexts, valid: Tensor
    ) -> tuple[Tensor, Contexts]:
        """Call the core; each link attends to its context and to the wavefront."""
        left, seen = iter(contexts), []
        for link in self._links:
            if link.attends:
                h, its = link.attend(h, positions, next(left), valid)
                seen.append(its)
            else:
                h = link.link(h)
        return h, tuple(seen)

    def _visible(self, done: Contexts, behind: int) -> Contexts:
        """Part of the cache that a wavefront sees."""
        stop = max(0, done[0].slots - behind)
        start = 0
        if self.steps is not None:
            start = max(0, stop - (self.steps - self._runs) * self.chunk_len)
        return tuple(its.part(start, stop) for its in done)

    def _remember(self, done: Contexts, final: Tensor, positions: Tensor) -> Contexts:
        """Append final vectors to the cache, projected once for each link."""
        added = (link.project(final, positions) for link in self._attending)
        longer = tuple(a.then(b) for a, b in zip(done, added, strict=True))
        if self.steps is None:
            return longer
        return tuple(its.part(max(0, its.slots - self._kept), its.slots) for its in longer)
