"""Cached Staircase: a chunk goes through few passes, and is remembered by its last one."""

from collections import deque
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.layers.base import AnyLayer, SequenceLayer, values_at_hand
from stateline.layers.compose import Recomputes
from stateline.layers.context import Context, ContextLink, context_links
from stateline.layers.phases import by_phase
from stateline.layers.staircase import climb, cut
from stateline.layers.state import nbytes

Contexts = tuple[Context, ...]
"""Keys and values for each link that attends."""


class CachedStaircaseState(NamedTuple):
    """How many tokens each row has seen, the cache, and what each pass has seen of live chunks.

    Slots end at the last token; a row that has seen fewer leaves the first ones free.
    """

    length: Int[Tensor, " batch"]
    cache: Contexts
    live: tuple[Contexts, ...]


class GlobalCachedStaircaseState(NamedTuple):
    """The same, with a cache that holds every token."""

    length: Int[Tensor, " batch"]
    cache: Contexts
    live: tuple[Contexts, ...]

    @staticmethod
    def trim(state: "GlobalCachedStaircaseState") -> "GlobalCachedStaircaseState":
        """Leave out the slots that no row has filled."""
        slots, used = state.cache[0].slots, int(state.length.max())
        return state._replace(cache=tuple(its.part(slots - used, slots) for its in state.cache))


State = CachedStaircaseState | GlobalCachedStaircaseState


class CachedStaircase(Recomputes, SequenceLayer[State]):
    r"""A staircase that sees chunks which have left it by keys and values of their final vectors.

    Chunk i is computed in M = ``passes`` wavefronts, as in a staircase, and then stays visible for
    N - M more: every layer of the core sees the same final vectors :math:`h_j^M`, each through keys
    and values of its own. Pass n of chunk i sees its own chunk causally, and

    .. math::
        h_j^{n+i-j} \;\; (i - M + n \le j < i), \qquad
        h_j^M \;\; (i - N + n \le j < i - M + n)

    where N = ``steps``. So every layer sees the top of the model at earlier chunks, not its own
    level. With M = N nothing is cached: that is the plain staircase. ``steps=none`` never forgets:
    the Global Cached Staircase.

    The core must take keys and values that are not of its own input: attention and feed-forwards,
    in stacks and ladders (:mod:`stateline.layers.context`). A final vector is projected once per
    layer.

    Cost: M passes for each token, in T / C + M - 1 core calls that wait for each other (C =
    ``chunk_len``). The state is constant, keys and values of N C cached and M (M + 1) C / 2 live
    tokens per layer; with ``steps=none`` the cache grows by every token.

    Differs from official training, which finishes the chunks in flight at the end of a segment, so
    that the next segment sees them by their final vectors only: here cuts change nothing. Before
    the first chunk there is nothing, not zeros that are attended to.

    Args:
        core: Attention and feed-forwards.
        passes: How often a chunk goes through the core, M.
        chunk_len: Tokens in a chunk, C.
        steps: For how many wavefronts a chunk is seen, N; ``None`` for ever.

    Raises:
        InputError: If the core has layers that cannot attend to a context, or a number does not
            fit.

    References:
        Ju et al., "Staircase Attention for Recurrent Processing of Sequences", 2021, section 3.3.
    """

    def __init__(
        self, core: AnyLayer, *, passes: int = 1, chunk_len: int = 4, steps: int | None = 16
    ) -> None:
        super().__init__(core.d_model)
        context_links("cached_staircase", core)
        if passes < 1 or chunk_len < 1 or (steps is not None and steps < passes):
            raise InputError(
                "passes and chunk_len must be at least 1, and steps at least passes, "
                f"got {passes=}, {chunk_len=} and {steps=}"
            )
        self.core, self.passes, self.chunk_len, self.steps = core, passes, chunk_len, steps

    def init_state(self, batch_size: int, *, capacity: int = 0) -> State:
        """No token seen; a cache without end gets ``capacity`` free slots."""
        state = self._blank(batch_size)
        slots = capacity if self.steps is None else self._kept
        return state._replace(
            cache=tuple(context.with_slots(slots) for context in state.cache),
            live=self._fitted(state.live),
        )

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Run all wavefronts."""
        return self._advance(x, self._blank(len(x)), 0)[0]

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: State
    ) -> tuple[Float[Tensor, "batch length d_model"], State]:
        """Finish the open chunk, run whole ones, and begin the next."""
        if not x.shape[1]:
            return x, state
        return by_phase(self._advance, x, state, state.length % self.chunk_len)

    def step_(
        self, x: Float[Tensor, "batch d_model"], state: State
    ) -> Float[Tensor, "batch d_model"]:
        """All passes of one token; the slots move on by one."""
        slots = state.cache[0].slots
        if self.steps is None and values_at_hand(x) and int(state.length.max()) >= slots:
            raise InputError(
                f"the state has no free slot left (of {slots}): make it with "
                "init_state(batch_size, capacity=n) for n steps in place"
            )
        y, after = self.step(x, state)
        for old, new in zip(pytree.tree_leaves(state), pytree.tree_leaves(after), strict=True):
            old.copy_(new[:, -old.shape[1] :] if old.ndim > 1 else new)
        return y

    def state_bytes(self, length: int) -> int:
        """Bytes of live and cached keys and values, and of the length."""
        state = self.init_state(1, capacity=1)
        cached = nbytes(state.cache) * (length if self.steps is None else 1)
        return cached + nbytes(state.live) + 8

    def flops_per_token(self, length: int) -> float:
        """Operations of the core on what a wavefront sees, once per pass."""
        seen = length if self.steps is None else min(length, self.steps * self.chunk_len)
        return self.passes * self.core.flops_per_token(seen)

    @property
    def _links(self) -> list[ContextLink]:
        return context_links("cached_staircase", self.core)

    @property
    def _kept(self) -> int:
        """Slots of a cache that has an end: what the first pass may see, and the open chunk."""
        assert self.steps is not None
        return self.steps * self.chunk_len if self.steps > self.passes else 0

    def _blank(self, batch_size: int) -> State:
        """No token seen, and no slots."""
        x = self.example_input(batch_size, 0)
        positions = torch.zeros(batch_size, 0, dtype=torch.int64, device=x.device)
        contexts = tuple(link.project(x, positions) for link in self._links if link.attends)
        length = torch.zeros(batch_size, dtype=torch.int64, device=x.device)
        kind = GlobalCachedStaircaseState if self.steps is None else CachedStaircaseState
        return kind(length, contexts, (contexts,) * self.passes)

    def _fitted(self, live: tuple[Contexts, ...]) -> tuple[Contexts, ...]:
        """With as many slots as each pass needs, whatever the phase."""
        return tuple(
            tuple(context.with_slots((self.passes - n) * self.chunk_len) for context in contexts)
            for n, contexts in enumerate(live)
        )

    def _advance(self, x: Tensor, state: State, phase: int) -> tuple[Tensor, State]:
        """Run the wavefronts of a piece whose rows are all at one place of their chunks.

        As in a staircase, wavefront s goes on from what pass s + 1 has seen of live chunks. Those
        are ``behind`` tokens, before which the cached ones end.
        """
        chunks = cut(x, self.chunk_len, phase)
        starts = torch.tensor([0, *(c.shape[1] for c in chunks)]).cumsum(0).tolist()
        done = state.cache
        after: deque[Contexts] = deque(maxlen=self.passes)

        def wavefront(s: int, h: Tensor) -> Tensor:
            nonlocal done
            oldest = max(0, s - self.passes + 1)
            start = state.length + starts[oldest]
            positions = start[:, None] + torch.arange(h.shape[1], device=h.device)
            behind = max(0, (self.passes - 1 - s) * self.chunk_len + phase * (s < self.passes))
            cached = self._visible(done, behind)
            if behind:
                live = (its.part(its.slots - behind, its.slots) for its in state.live[s])
                context = tuple(a.then(b) for a, b in zip(cached, live, strict=True))
            else:
                context = cached
            y, seen = self.run(self._cross, h, positions, context, start)
            hidden = context[0].slots - behind
            after.append(tuple(its.part(hidden, its.slots) for its in seen))
            if s >= self.passes - 1:
                final = slice(0, chunks[oldest].shape[1])
                done = self._remember(done, y[:, final], positions[:, final])
            return y

        y = climb(chunks, self.passes, wavefront)
        live = tuple(after)
        if (phase + x.shape[1]) % self.chunk_len == 0:
            live = (*live[1:], self._blank(len(x)).cache)
        length = state.length + x.shape[1]
        return y, state._replace(length=length, cache=done, live=self._fitted(live))

    def _cross(
        self, h: Tensor, positions: Tensor, contexts: Contexts, valid: Tensor
    ) -> tuple[Tensor, Contexts]:
        """One call of the core, each link of which attends to its context and to the wavefront."""
        left, seen = iter(contexts), []
        for link in self._links:
            if link.attends:
                h, its = link.attend(h, positions, next(left), valid)
                seen.append(its)
            else:
                h = link.link(h)
        return h, tuple(seen)

    def _visible(self, done: Contexts, behind: int) -> Contexts:
        """What a wavefront sees of the cache."""
        stop = max(0, done[0].slots - behind)
        start = 0
        if self.steps is not None:
            start = max(0, stop - (self.steps - self.passes) * self.chunk_len)
        return tuple(its.part(start, stop) for its in done)

    def _remember(self, done: Contexts, final: Tensor, positions: Tensor) -> Contexts:
        """The cache with final vectors added to it, projected once for each link."""
        links = [link for link in self._links if link.attends]
        added = (link.project(final, positions) for link in links)
        longer = tuple(a.then(b) for a, b in zip(done, added, strict=True))
        if self.steps is None:
            return longer
        return tuple(its.part(max(0, its.slots - self._kept), its.slots) for its in longer)
