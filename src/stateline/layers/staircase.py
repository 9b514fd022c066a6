"""Staircase: recurrence in depth and time over chunks, around any core."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.errors import InputError
from stateline.layers.base import AnyLayer, SequenceLayer
from stateline.layers.compose import Recomputes
from stateline.layers.phases import by_phase
from stateline.layers.state import overwrite_rows, replace_rows


class StaircaseState(NamedTuple):
    """Where in its chunk each row is, free slots to keep for steps in place, one state per pass."""

    phase: Int[Tensor, " batch"]
    room: Int[Tensor, " batch"]
    passes: tuple[Any, ...]


class Staircase(Recomputes, SequenceLayer[StaircaseState]):
    r"""Each chunk goes through one core several times, in company of the chunks before it.

    Chunk i goes in at wavefront i and comes out after N = ``passes`` wavefronts. Wavefront s runs
    the core on the chunks that are in flight, the oldest first, from a fresh state:

    .. math::
        h_{s-N+1}^{N}, \ldots, h_s^{1} =
        \mathrm{core}\!\left(h_{s-N+1}^{N-1}, \ldots, h_s^{0}\right), \qquad h_i^0 = x_i

    So pass n of chunk i sees pass n + i - j of the chunks j before it, of which the last pass sees
    none and the first N - 1. What is computed of one chunk enters the core again with the next:
    depth grows with time, which is what lets a staircase track a state.

    As a stream it has one rule. There are N core states; pass n of the open chunk uses state n, and
    at the end of the chunk every state moves down by one, since what pass n + 1 has seen up to
    here is what pass n will have seen before the next chunk; the last begins anew.

    Cost: N passes for each token, in T / C + N - 1 core calls that wait for each other (C =
    ``chunk_len``), or N steps of the core for a token in decoding. The state is bounded for any
    core, since no pass sees more than N C tokens. One pass is the core on each chunk by itself.

    Differs from the official code, which keeps layer outputs in place of layer inputs across
    segments and attends to zeros before the first chunk: here cuts change nothing.

    Args:
        core: Any sequence layer.
        passes: How often a chunk goes through it, N.
        chunk_len: Tokens in a chunk, C.

    Raises:
        InputError: If ``passes`` or ``chunk_len`` is not positive.

    References:
        Ju et al., "Staircase Attention for Recurrent Processing of Sequences", 2021, section 3.2.
    """

    def __init__(self, core: AnyLayer, *, passes: int = 2, chunk_len: int = 4) -> None:
        super().__init__(core.d_model)
        if passes < 1 or chunk_len < 1:
            raise InputError(
                f"passes and chunk_len must be at least 1, got {passes=} and {chunk_len=}"
            )
        self.core, self.passes, self.chunk_len = core, passes, chunk_len

    def init_state(self, batch_size: int, *, capacity: int = 0) -> StaircaseState:
        """No chunk begun."""
        room = min(capacity, self.passes * self.chunk_len)
        first = next(self.parameters(), torch.empty(0))
        phase = torch.zeros(batch_size, dtype=torch.int64, device=first.device)
        passes = (self.core.init_state(batch_size, capacity=room) for _ in range(self.passes))
        return StaircaseState(phase, torch.full_like(phase, room), tuple(passes))

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Run all wavefronts."""
        chunks = list(x.split(self.chunk_len, dim=1))
        return climb(chunks, self.passes, lambda _, h: self.run(self.core, h))

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: StaircaseState
    ) -> tuple[Float[Tensor, "batch length d_model"], StaircaseState]:
        """Finish the open chunk, run whole ones, and begin the next."""
        return by_phase(self._advance, x, state, state.phase) if x.shape[1] else (x, state)

    def step(
        self, x: Float[Tensor, "batch d_model"], state: StaircaseState
    ) -> tuple[Float[Tensor, "batch d_model"], StaircaseState]:
        """All passes of one token; rows may stand anywhere in their chunks."""
        after = []
        for before in state.passes:
            x, new = self.core.step(x, before)
            after.append(new)
        ended = state.phase == self.chunk_len - 1
        if ended.any():
            following = (*after[1:], self._begun(state))
            pairs = zip(after, following, strict=True)
            after = [b if ended.all() else replace_rows(a, ended, b) for a, b in pairs]
        phase = (state.phase + 1) % self.chunk_len
        return x, StaircaseState(phase, state.room, tuple(after))

    def step_(
        self, x: Float[Tensor, "batch d_model"], state: StaircaseState
    ) -> Float[Tensor, "batch d_model"]:
        """All passes of one token, each in place; at a chunk's end, states move down."""
        for own in state.passes:
            x = self.core.step_(x, own)
        ended = state.phase == self.chunk_len - 1
        if ended.any():
            # No state needs more room for what it takes over: the pass after has seen less.
            following = (*state.passes[1:], self._begun(state))
            for own, other in zip(state.passes, following, strict=True):
                overwrite_rows(own, ended, other)
        state.phase.add_(1).remainder_(self.chunk_len)
        return x

    def state_bytes(self, length: int) -> int:
        """Bytes of the states of all passes, which have seen no more than ``passes`` chunks."""
        chunks, phase = divmod(length, self.chunk_len)
        seen = (min(chunks, older) * self.chunk_len + phase for older in range(self.passes))
        return 16 + sum(self.core.state_bytes(tokens) for tokens in seen)

    def flops_per_token(self, length: int) -> float:
        """Operations of the core on the tokens of a wavefront, once per pass."""
        seen = min(length, self.passes * self.chunk_len)
        return self.passes * self.core.flops_per_token(seen)

    def _advance(
        self, x: Tensor, state: StaircaseState, phase: int
    ) -> tuple[Tensor, StaircaseState]:
        """Run the wavefronts of a piece whose rows are all at one place of their chunks.

        Wavefront s goes on from state s, which has seen the chunks before the piece; those from
        the N-th on have no such chunk. The states that the last N wavefronts leave, in which the
        last chunk was at pass 1, ..., N, are those to carry on.
        """
        chunks = cut(x, self.chunk_len, phase)
        begun = self._begun(state)
        after: deque[Any] = deque(maxlen=self.passes)

        def wavefront(s: int, h: Tensor) -> Tensor:
            before = state.passes[s] if s < self.passes else begun
            y, new = self.run(self.core.forward_chunk, h, before)
            after.append(new)
            return y

        y = climb(chunks, self.passes, wavefront)
        passes = tuple(after)
        phase = (phase + x.shape[1]) % self.chunk_len
        if phase == 0:
            passes = (*passes[1:], begun)
        return y, StaircaseState(torch.full_like(state.phase, phase), state.room, passes)

    def _begun(self, state: StaircaseState) -> Any:
        """A core state before the first token, with as much room as the others."""
        return self.core.init_state(len(state.phase), capacity=int(state.room.max()))


def cut(
    x: Float[Tensor, "batch length d_model"], chunk_len: int, phase: int
) -> list[Float[Tensor, "batch chunk d_model"]]:
    """Chunks of a piece that begins ``phase`` tokens into one; the last may stay open."""
    head, rest = x[:, : chunk_len - phase], x[:, chunk_len - phase :]
    return [head, *(rest.split(chunk_len, dim=1) if rest.shape[1] else ())]


def climb(
    chunks: Sequence[Float[Tensor, "batch _ d_model"]],
    passes: int,
    wavefront: Callable[[int, Tensor], Tensor],
) -> Float[Tensor, "batch length d_model"]:
    """Take every chunk through its passes.

    Args:
        chunks: In order.
        passes: Through how many wavefronts each goes.
        wavefront: ``(s, h) -> h``: wavefront s on the chunks in flight, the oldest first.

    Returns:
        The chunks after their last pass, joined.
    """
    h = list(chunks)
    for s in range(len(h) + passes - 1):
        flight = slice(max(0, s - passes + 1), s + 1)
        y = wavefront(s, torch.cat(h[flight], dim=1))
        h[flight] = y.split([chunk.shape[1] for chunk in h[flight]], dim=1)
    return torch.cat(h, dim=1)
