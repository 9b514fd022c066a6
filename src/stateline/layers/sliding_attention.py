"""Causal softmax attention to the last few positions."""

from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stateline.errors import InputError, unknown_name
from stateline.layers.base import SequenceLayer, zeros
from stateline.layers.context import AttendsToContext, Context
from stateline.layers.norm import unit_length
from stateline.ops import local_attention
from stateline.ops.positions import alibi_slopes, rotate, t5_buckets

Position = Literal["none", "rope", "alibi", "relative", "t5"]

_BUCKETS = 32


class SlidingAttentionState(NamedTuple):
    """Keys and values of the last positions, the latest last, and how many there have been."""

    k: Float[Tensor, "batch span head d_head"]
    v: Float[Tensor, "batch span head d_head"]
    length: Int[Tensor, " batch"]


class SlidingAttention(SequenceLayer[SlidingAttentionState], AttendsToContext):
    r"""Multi-head causal attention with a window: position i sees the ``window`` last positions.

    .. math::
        y_i = W_o \left[ \sum_{i - w < j \le i}
        \mathrm{softmax}_j\!\left(\frac{q_i \cdot (k_j + p_{i-j})}{\sqrt d} + b_{i-j}\right) v_j
        \right]_h

    The state is a cache of the window, constant in size, and exact at any cut: this is the memory
    of a Transformer-XL. Cost and memory of ``forward`` are linear in the length; there is no square
    of scores.

    With ``blocks``, the window begins with a block: a position sees its own block of w positions,
    up to itself, and the whole block before. So it sees between w + 1 and 2 w positions.

    Differs from Transformer-XL training code, which keeps the inputs of a layer and projects them
    anew in every segment: we keep keys and values, which is the same but for the gradient that
    W_k and W_v would get through the memory.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads; must divide ``d_model``.
        window: How many positions are seen, w.
        position: How near and far are told apart. ``none``: not at all. ``rope``: rotary embedding.
            ``alibi``: a penalty linear in the distance. ``relative``: a learned key p for each
            distance, the same for all heads. ``t5``: a learned bias b by head and bucket of
            distances, see :func:`stateline.ops.positions.t5_buckets`.
        includes_self: Whether a position sees itself; if not, the window ends right before it.
        blocks: Whether windows begin where blocks of ``window`` positions do.
        qk_norm: Whether queries and keys have length one, and a learned scale per head, at first 1,
            stands for :math:`1 / \sqrt d`; biases are scaled, too.
        zeros_before: Whether the first positions see a window of zeros before them, which take
            their share of the weights, as in Transformer-XL and Block-Recurrent training code.
            Wrappers that keep a context of their own begin without them.
        bias: Whether the projections have biases.

    Raises:
        InputError: If the heads do not fit the width, the window is empty, or the position scheme
            is unknown.

    References:
        Dai et al., "Transformer-XL", 2019; Shaw et al., 2018, for ``relative``; Ju et al., 2021,
        for its use in ladders and staircases; ``t5`` with ``qk_norm`` and without self: the
        sliding window of Hutchins et al., "Block-Recurrent Transformers", 2022.
    """

    def __init__(  # noqa: PLR0913
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        window: int = 128,
        position: Position = "none",
        includes_self: bool = True,
        blocks: bool = False,
        qk_norm: bool = False,
        zeros_before: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(d_model)
        if n_heads < 1 or d_model % n_heads:
            raise InputError(f"n_heads must divide d_model, got {n_heads=} and {d_model=}")
        if window < 1:
            raise InputError(f"window must be at least 1, got window={window}")
        if position not in get_args(Position):
            raise unknown_name("position", position, get_args(Position))
        if position == "rope" and d_model // n_heads % 2:
            raise InputError(
                "rope rotates pairs of entries: d_model / n_heads must be even, "
                f"got {d_model=} and {n_heads=}"
            )
        self.n_heads, self.d_head, self.window = n_heads, d_model // n_heads, window
        self.position, self.includes_self, self.blocks = position, includes_self, blocks
        self.zeros_before = zeros_before
        self.q_proj = nn.Linear(d_model, d_model, bias=bias)
        self.kv_proj = nn.Linear(d_model, 2 * d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        self.position_keys: nn.Parameter | None = None
        if position == "relative":
            self.position_keys = nn.Parameter(torch.randn(self.reach, self.d_head))
        self.bucket_bias: nn.Parameter | None = None
        if position == "t5":
            self.bucket_bias = nn.Parameter(torch.randn(n_heads, _BUCKETS) * d_model**-0.5)
        self.scale = nn.Parameter(torch.ones(n_heads)) if qk_norm else None
        slopes = alibi_slopes(n_heads) if position == "alibi" else None
        self.slopes: Tensor | None
        self.register_buffer("slopes", slopes, persistent=False)

    @property
    def reach(self) -> int:
        """How many positions are seen at most."""
        return 2 * self.window - (not self.includes_self) if self.blocks else self.window

    @property
    def span(self) -> int:
        """How many positions before its own a position sees at most."""
        return self.reach - self.includes_self

    def init_state(self, batch_size: int, *, capacity: int = 0) -> SlidingAttentionState:  # noqa: ARG002
        """Nothing seen yet; with ``zeros_before``, as many zeros as can ever be seen."""
        free = zeros(self.q_proj.weight, batch_size, self.span, self.n_heads, self.d_head)
        seen = 2 * self.window if self.zeros_before else 0
        length = torch.full((batch_size,), seen, dtype=torch.int64, device=free.device)
        return SlidingAttentionState(free, free.clone(), length)

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Attend to the window at every position."""
        if not x.shape[1]:
            return x
        if self.zeros_before:
            return self.forward_chunk(x, self.init_state(len(x)))[0]
        positions = torch.arange(x.shape[1], device=x.device)[None]
        return self._attend(self._queries(x, positions), self.project_context(x, positions), None)

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: SlidingAttentionState
    ) -> tuple[Float[Tensor, "batch length d_model"], SlidingAttentionState]:
        """Attend to the cache and to the window inside the chunk; the cache moves on."""
        positions = state.length[:, None] + torch.arange(x.shape[1], device=x.device)
        y, seen = self.attend(x, positions, Context(state.k, state.v), state.length)
        return y, SlidingAttentionState(*seen.with_slots(self.span), state.length + x.shape[1])

    def project_context(
        self, x: Float[Tensor, "batch length d_model"], positions: Int[Tensor, "rows length"]
    ) -> Context:
        """Keys and values of given vectors."""
        k, v = self.kv_proj(x).unflatten(-1, (2, self.n_heads, self.d_head)).unbind(dim=2)
        k = k if self.scale is None else unit_length(k)
        return Context(self._rotated(k, positions), v)

    def attend(
        self,
        x: Float[Tensor, "batch length d_model"],
        positions: Int[Tensor, "batch length"],
        context: Context,
        valid: Int[Tensor, " batch"],
        *,
        to_itself: bool = True,
    ) -> tuple[Float[Tensor, "batch length d_model"], Context]:
        """Attend to the part of a context, and of the input itself, that lies in the window."""
        first = (context.slots - valid).clamp(min=0)
        if to_itself:
            context = context.then(self.project_context(x, positions))
        nearest = 0 if to_itself else 1
        phase = positions[:, 0] % self.window if self.blocks and x.shape[1] else None
        y = self._attend(self._queries(x, positions), context, first, nearest, phase)
        return y, context

    def state_bytes(self, length: int) -> int:  # noqa: ARG002
        """Keys and values of the window, and the length."""
        return 2 * self.span * self.d_model * self.q_proj.weight.element_size() + 8

    def flops_per_token(self, length: int) -> float:
        """Scores and weighted sums over at most the window."""
        most = 1.5 * self.window if self.blocks else self.window
        seen = min((length + 1) / 2, most)
        return super().flops_per_token(length) + 4.0 * self.d_model * seen

    def _queries(self, x: Tensor, positions: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.n_heads, self.d_head))
        if self.scale is not None:  # the op divides by the root
            q = unit_length(q) * (self.scale * self.d_head**0.5)[:, None]
        return self._rotated(q, positions)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions, dims=self.d_head) if self.position == "rope" else x

    def _attend(
        self,
        q: Float[Tensor, "batch length head d_head"],
        seen: Context,
        free: Int[Tensor, " batch"] | None,
        nearest: int = 0,
        phase: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """Attend to slots, of which the last lies ``nearest`` positions before the last query."""
        bias = self._bias(q.device)
        skipped, keys = nearest - (not self.includes_self), self.position_keys
        if skipped < 0:  # the last slot is that of the last query itself, which it does not see
            seen = Context(*(F.pad(t, (0, 0, 0, 0, 1, -1)) for t in seen))
            none = torch.zeros(len(q), dtype=torch.int64, device=q.device)
            free = 1 + (none if free is None else free)
        heads = local_attention(
            q,
            *seen,
            window=self.reach - max(skipped, 0),
            first=free,
            bias=bias if bias is None or skipped <= 0 else bias[:, skipped:],
            position_keys=keys if keys is None or skipped <= 0 else keys[skipped:],
            block_len=self.window if self.blocks else None,
            phase=phase,
        )
        return self.out_proj(heads.flatten(2))

    def _bias(self, device: torch.device) -> Float[Tensor, "head reach"] | None:
        """What is added to the scores, by distance."""
        distance = torch.arange(self.reach, device=device) + (not self.includes_self)
        if self.slopes is not None:
            bias = -self.slopes[:, None] * distance
        elif self.bucket_bias is not None:
            bias = self.bucket_bias[:, t5_buckets(distance, n_buckets=_BUCKETS)]
        else:
            return None
        return bias if self.scale is None else bias * self.scale[:, None]
