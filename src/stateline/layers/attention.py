"""Causal softmax attention with a growing key-value cache."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stateline.errors import InputError, unknown_name
from stateline.layers.base import SequenceLayer, values_at_hand, zeros
from stateline.layers.context import AttendsToContext, Context
from stateline.ops import attention, local_attention
from stateline.ops.positions import alibi_slopes, hard_alibi_windows, rotate

Position = Literal["none", "rope", "alibi", "hard_alibi"]


class AttentionState(NamedTuple):
    """Keys and values so far: slot j holds position j, and slots from ``length`` on are free."""

    k: Float[Tensor, "batch slot head d_head"]
    v: Float[Tensor, "batch slot head d_head"]
    length: Int[Tensor, " batch"]

    @staticmethod
    def cat(states: Sequence["AttentionState"]) -> "AttentionState":
        """Join rows of different lengths: the shorter ones get free slots."""
        slots = max(state.k.shape[1] for state in states)

        def join(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat([F.pad(t, (0, 0, 0, 0, 0, slots - t.shape[1])) for t in tensors])

        return AttentionState(
            join([state.k for state in states]),
            join([state.v for state in states]),
            torch.cat([state.length for state in states]),
        )

    @staticmethod
    def trim(state: "AttentionState") -> "AttentionState":
        """Leave out the slots that no row has filled."""
        used = int(state.length.max())
        return AttentionState(state.k[:, :used], state.v[:, :used], state.length)


class Attention(SequenceLayer[AttentionState], AttendsToContext):
    r"""Multi-head causal attention.

    .. math::
        y_i = W_o \left[ \sum_{j \le i}
        \mathrm{softmax}_j(q_i \cdot k_j / \sqrt d + b_{ij})\, v_j \right]_h

    The state is the cache of all keys and values: it grows with the length, and so does the cost of
    a step.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads; must divide ``d_model``.
        position: How a head tells near from far. ``none``: not at all, beyond the causal mask.
            ``rope``: rotary embedding. ``alibi``: a penalty linear in the distance.
            ``hard_alibi``: the first ``masked_heads`` heads see themselves and 0, 1, 2, ...
            tokens back, the others see all.
        masked_heads: For ``hard_alibi``; by default half of the heads.
        rotary_fraction: For ``rope``: part of each head's entries that is rotated.
        rope_base: For ``rope``: wavelength of the slowest rotation, in units of 2 pi tokens.
        bias: Whether the projections have biases.
        double_count: Whether all but the first quarter of a head's entries count twice in the
            score, :math:`(q \cdot k + q_{r:} \cdot k_{r:}) / \sqrt d` with
            :math:`r = \lfloor d / 4 \rfloor`. That is what the official code of "Repeat After Me"
            computes for ``none``, ``alibi`` and ``hard_alibi``, and what its weights need.

    Raises:
        InputError: If the heads do not fit the width, an option does not fit the heads, or the
            position scheme is unknown.

    References:
        Vaswani et al., 2017; positions: see :mod:`stateline.ops.positions`.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        position: Position = "none",
        masked_heads: int | None = None,
        rotary_fraction: float = 1.0,
        rope_base: float = 10_000.0,
        bias: bool = False,
        double_count: bool = False,
    ) -> None:
        super().__init__(d_model)
        if n_heads < 1 or d_model % n_heads:
            raise InputError(f"n_heads must divide d_model, got {n_heads=} and {d_model=}")
        if position not in get_args(Position):
            raise unknown_name("position", position, get_args(Position))
        self.n_heads, self.d_head, self.position = n_heads, d_model // n_heads, position
        self.rotary_dims = int(self.d_head * rotary_fraction) // 2 * 2
        self.rope_base, self.double_count = rope_base, double_count
        if position == "rope" and not 2 <= self.rotary_dims <= self.d_head:
            raise InputError(
                "rope rotates pairs of entries: rotary_fraction * d_head must be from 2 to d_head, "
                f"got {rotary_fraction=} and d_head={self.d_head}"
            )
        masked = n_heads // 2 if masked_heads is None else masked_heads
        if not 0 <= masked <= n_heads:
            raise InputError(
                f"masked_heads must be from 0 to n_heads, got {masked_heads=}, {n_heads=}"
            )
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        slopes = alibi_slopes(n_heads) if position == "alibi" else None
        windows = hard_alibi_windows(n_heads, masked) if position == "hard_alibi" else None
        self.slopes: Tensor | None
        self.windows: Tensor | None
        self.register_buffer("slopes", slopes, persistent=False)
        self.register_buffer("windows", windows, persistent=False)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> AttentionState:
        """Empty cache with ``capacity`` free slots."""
        free = zeros(self.qkv.weight, batch_size, capacity, self.n_heads, self.d_head)
        length = torch.zeros(batch_size, dtype=torch.int64, device=free.device)
        return AttentionState(free, free.clone(), length)

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Attend to the whole prefix at every position."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        q, k, v = self._project(x, positions)
        return self._merge(attention(q, k, v, slopes=self.slopes, windows=self.windows))

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: AttentionState
    ) -> tuple[Float[Tensor, "batch length d_model"], AttentionState]:
        """Attend to the cache and to the prefix of the chunk; the cache grows by the chunk."""
        length = x.shape[1]
        positions = state.length[:, None] + torch.arange(length, device=x.device)
        q, k, v = self._project(x, positions)
        slots = positions[..., None, None].expand_as(k)

        def append(cache: Tensor, new: Tensor) -> Tensor:
            return F.pad(cache, (0, 0, 0, 0, 0, length)).scatter(1, slots, new.to(cache.dtype))

        after = AttentionState(append(state.k, k), append(state.v, v), state.length + length)
        return self._attend(q, after, state.length), after

    def step_(
        self, x: Float[Tensor, "batch d_model"], state: AttentionState
    ) -> Float[Tensor, "batch d_model"]:
        """Write the token's key and value into the free slot after the last one."""
        slot = state.length[:, None]
        if values_at_hand(slot) and int(slot.max()) >= state.k.shape[1]:
            raise InputError(
                f"the state has no free slot left (of {state.k.shape[1]}): make it with "
                "init_state(batch_size, capacity=n) for n steps in place"
            )
        q, k, v = self._project(x[:, None], slot)
        index = slot[..., None, None].expand_as(k)
        state.k.scatter_(1, index, k.to(state.k.dtype))
        state.v.scatter_(1, index, v.to(state.v.dtype))
        y = self._attend(q, state, state.length)
        state.length.add_(1)
        return y[:, 0]

    def project_context(
        self, x: Float[Tensor, "batch length d_model"], positions: Int[Tensor, "batch length"]
    ) -> Context:
        """Keys and values of given vectors."""
        _, k, v = self._project(x, positions)
        return Context(k, v)

    def attend(
        self,
        x: Float[Tensor, "batch length d_model"],
        positions: Int[Tensor, "batch length"],
        context: Context,
        valid: Int[Tensor, " batch"],
        *,
        to_itself: bool = True,
    ) -> tuple[Float[Tensor, "batch length d_model"], Context]:
        """Attend to a context and to the prefix of the input itself."""
        first = context.slots - valid.clamp(max=context.slots)
        q, k, v = self._project(x, positions)
        nearest = 0 if to_itself else 1
        if to_itself:
            context = context.then(Context(k, v))
        window = context.slots
        bias = self._bias(torch.arange(nearest, nearest + window, device=x.device))
        heads = local_attention(q, *context, window=window, first=first, bias=bias)
        return self._merge(heads), context

    def state_bytes(self, length: int) -> int:
        """A key and a value per token, and the length."""
        return 2 * length * self.d_model * self.qkv.weight.element_size() + 8

    def flops_per_token(self, length: int) -> float:
        """Scores and weighted sums over (length + 1) / 2 keys on average."""
        return super().flops_per_token(length) + 2.0 * self.d_model * (length + 1)

    def _project(
        self, x: Float[Tensor, "batch length d_model"], positions: Int[Tensor, "rows length"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (batch, length, head, d_head)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, self.d_head)).unbind(dim=2)
        if self.position == "rope":
            q = rotate(q, positions, dims=self.rotary_dims, base=self.rope_base)
            k = rotate(k, positions, dims=self.rotary_dims, base=self.rope_base)
        # Differs from the official code of "Repeat After Me", which has this always: its paper has
        # it nowhere, and twice a query is the same family of functions.
        if self.double_count:
            once, twice = q.tensor_split([self.d_head // 4], dim=-1)
            q = torch.cat([once, 2 * twice], dim=-1)
        return q, k, v

    def _bias(self, distance: Int[Tensor, " slot"]) -> Float[Tensor, "head slot"] | None:
        """What is added to the scores at a distance."""
        if self.slopes is not None:
            return -self.slopes[:, None] * distance
        if self.windows is not None:
            bias = torch.zeros(self.n_heads, len(distance), device=distance.device)
            return bias.masked_fill(distance >= self.windows[:, None], float("-inf"))
        return None

    def _attend(self, q: Tensor, state: AttentionState, start: Tensor) -> Tensor:
        return self._merge(
            attention(q, state.k, state.v, start, slopes=self.slopes, windows=self.windows)
        )

    def _merge(self, heads: Float[Tensor, "batch length head d_head"]) -> Tensor:
        return self.out_proj(heads.flatten(2))
