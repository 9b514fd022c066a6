"""Staircase: recurrence in depth and time over chunks, around any core."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import AnyLayer, SequenceLayer, require_causal, require_same_width
from stateline.layers.compose import ActivationCheckpointing
from stateline.layers.state import cat_states, overwrite_rows, replace_rows, select_rows
from stateline.settings import Count

StateT = TypeVar("StateT")


class StaircaseState(NamedTuple):
    """Offset of each row in its chunk, free slots for steps in place, and one state per pass."""

    phase: Int[Tensor, " batch"]
    room: Int[Tensor, " batch"]
    passes: tuple[Any, ...]


class Staircase(ActivationCheckpointing, SequenceLayer[StaircaseState]):
    r"""Several passes of each chunk through one core, together with the chunks before it.

    Chunk i enters at wavefront i and leaves after N = ``passes`` wavefronts. Wavefront s runs the
    core from its initial state on the chunks in flight, the oldest first:

    .. math::
        h_{s-N+1}^{N}, \ldots, h_s^{1} =
        \mathrm{core}\!\left(h_{s-N+1}^{N-1}, \ldots, h_s^{0}\right), \qquad h_i^0 = x_i

    So pass n of chunk i sees pass n + i - j of earlier chunks j: N - 1 of them in the first pass,
    none in the last. Results of one chunk enter the core again with the next chunk, so depth grows
    with time; that lets a staircase track a state.

    Streaming uses N core states. Pass n of the current chunk uses state n. At the end of the chunk
    every state moves to the pass before, since pass n + 1 has now seen what pass n must have seen
    before the next chunk; the last pass gets the initial state.

    Cost: N passes per token, in T / C + N - 1 sequential core calls (C = ``chunk_len``), or N steps
    of the core per token in decoding. The state is bounded for any core, since no pass sees more
    than N C tokens. With one pass, the core runs on each chunk separately.

    ``forward_chunk`` and ``step`` read on the host where each row is in its chunk: under
    ``torch.compile``, only ``forward`` is a single graph.

    Differs from the official code, which keeps layer outputs instead of layer inputs across
    segments and attends to zeros before the first chunk. Here, the division into segments does not
    change the result.

    Args:
        core: Any sequence layer.
        passes: Number of passes of a chunk through the core, N.
        chunk_len: Number of tokens in a chunk, C.

    Raises:
        InputError: If ``passes`` or ``chunk_len`` is not positive.

    References:
        Ju et al., "Staircase Attention for Recurrent Processing of Sequences", 2021,
        section 3.2.1.
    """

    def __init__(self, core: AnyLayer, *, passes: Count = 2, chunk_len: Count = 4) -> None:
        super().__init__(core.d_model)
        require_same_width(core)
        require_causal(core, "staircase")
        self.core, self.passes, self.chunk_len = core, passes, chunk_len

    def init_state(self, batch_size: int, *, capacity: int = 0) -> StaircaseState:
        """Initial state of the core for each pass."""
        room = min(capacity, self.passes * self.chunk_len)
        first = next(self.parameters(), torch.empty(0))
        passes = [self.core.init_state(batch_size, capacity=room) for _ in range(self.passes)]
        phase = torch.zeros(batch_size, dtype=torch.int64, device=first.device)
        return StaircaseState(phase, torch.full_like(phase, room), tuple(passes))

    @override
    def forward(self, x: Tensor) -> Tensor:
        chunks = list(x.split(self.chunk_len, dim=1))
        return climb(chunks, self.passes, lambda _, h: self.run(self.core, h))

    @override
    def forward_chunk(self, x: Tensor, state: StaircaseState) -> tuple[Tensor, StaircaseState]:
        """Finish the current chunk, run whole chunks, and start the next one."""
        if not x.shape[1]:
            return x, state
        return by_phase(self._advance, x, state, state.phase)

    @override
    def step(self, x: Tensor, state: StaircaseState) -> tuple[Tensor, StaircaseState]:
        """Run all passes of one token; rows may be at different offsets in their chunks."""
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

    @override
    def step_(self, x: Tensor, state: StaircaseState) -> Tensor:
        """Run all passes of one token in place; at the end of a chunk, states move by one pass."""
        for own in state.passes:
            x = self.core.step_(x, own)
        ended = state.phase == self.chunk_len - 1
        if ended.any():
            # The later pass has seen less, so its state fits into the room of the earlier one.
            following = (*state.passes[1:], self._begun(state))
            for own, other in zip(state.passes, following, strict=True):
                overwrite_rows(own, ended, other)
        state.phase.add_(1).remainder_(self.chunk_len)
        return x

    def state_bytes(self, length: int) -> int:
        """Bytes of the states of all passes, which have seen at most ``passes`` chunks."""
        chunks, phase = divmod(length, self.chunk_len)
        seen = (min(chunks, older) * self.chunk_len + phase for older in range(self.passes))
        return 16 + sum(self.core.state_bytes(tokens) for tokens in seen)

    def flops_per_token(self, length: int) -> float:
        """Operations of the core on a wavefront, once per pass."""
        seen = min(length, self.passes * self.chunk_len)
        return self.passes * self.core.flops_per_token(seen)

    def _advance(
        self, x: Tensor, state: StaircaseState, phase: int
    ) -> tuple[Tensor, StaircaseState]:
        """Run the wavefronts of an input whose rows are all at the same offset in their chunks.

        Wavefront s continues from state s, which has seen the chunks before the input; the N-th
        and later wavefronts see no such chunk. The last N wavefronts, in which the last chunk was
        at pass 1, ..., N, leave the new states.
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
        """An initial state of the core with as much room as the other states."""
        room, most = int(state.room.max()), self.passes * self.chunk_len
        if room > most:
            raise InputError(f"states of this staircase have room for up to {most}, got {room}")
        return self.core.init_state(len(state.phase), capacity=room)


def by_phase(
    advance: Callable[[Tensor, StateT, int], tuple[Tensor, StateT]],
    x: Float[Tensor, "batch length d_model"],
    state: StateT,
    phase: Int[Tensor, " batch"],
) -> tuple[Float[Tensor, "batch length d_model"], StateT]:
    """Run the rows of each phase, their offset in a chunk, together, and restore their order.

    Reads the phases on the host, so it breaks the graph of ``torch.compile``. ``advance`` gives
    outputs and state of the rows of one phase.
    """
    phases = phase.tolist()
    if len(set(phases)) == 1:
        return advance(x, state, phases[0])
    outputs, states, order = [], [], []
    for place in sorted(set(phases)):
        rows = [row for row, its in enumerate(phases) if its == place]
        y, after = advance(x[rows], select_rows(state, rows), place)
        outputs.append(y)
        states.append(after)
        order += rows
    back = torch.tensor(order).argsort().to(x.device)
    return torch.cat(outputs)[back], select_rows(cat_states(states), back)


def cut(
    x: Float[Tensor, "batch length d_model"], chunk_len: int, phase: int
) -> list[Float[Tensor, "batch chunk d_model"]]:
    """Cut an input that starts ``phase`` tokens into a chunk; the last chunk may be short."""
    head, rest = x[:, : chunk_len - phase], x[:, chunk_len - phase :]
    return [head, *(rest.split(chunk_len, dim=1) if rest.shape[1] else ())]


def climb(
    chunks: Sequence[Float[Tensor, "batch _ d_model"]],
    passes: int,
    wavefront: Callable[[int, Tensor], Tensor],
) -> Float[Tensor, "batch length d_model"]:
    """The joined outputs of all chunks after all passes.

    ``wavefront(s, h)`` is wavefront s on the chunks in flight, the oldest first.
    """
    h = list(chunks)
    for s in range(len(h) + passes - 1):
        flight = slice(max(0, s - passes + 1), s + 1)
        y = wavefront(s, torch.cat(h[flight], dim=1))
        h[flight] = y.split([chunk.shape[1] for chunk in h[flight]], dim=1)
    return torch.cat(h, dim=1)
