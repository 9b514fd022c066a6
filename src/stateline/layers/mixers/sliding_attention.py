"""Causal softmax attention with a sliding window."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import zeros
from stateline.layers.context import AttendsToContext, Context, mean_visible
from stateline.layers.dropout import Dropout
from stateline.layers.linear import Linear
from stateline.layers.mixers.heads import HeadSettings, Offset, Rms, Rope, SoftmaxHeads, scaled
from stateline.layers.norm import scaled_queries, unit_length
from stateline.ops import LocalWindow, local_attention
from stateline.ops.positions import alibi_slopes, t5_buckets
from stateline.settings import Count

_BUCKETS = 32


class SlidingAttentionState(NamedTuple):
    """Keys and values of the last positions, the latest last, and the number of tokens so far."""

    k: Float[Tensor, "batch span kv_head d_head"]
    v: Float[Tensor, "batch span kv_head d_head"]
    length: Int[Tensor, " batch"]


@dataclass(frozen=True, kw_only=True)
class SlidingSettings(HeadSettings):
    r"""Settings of :class:`~stateline.layers.SlidingAttention`.

    It has the settings of :class:`~stateline.layers.mixers.heads.HeadSettings`, too.

    Attributes:
        window: Number of positions that a position sees, w.
        position: Position scheme. ``none``: only the mask. ``rope``: rotary embedding, see
            :class:`~stateline.layers.mixers.heads.Rope`. ``alibi``: a penalty linear in the
            distance. ``relative``: a learned key p for each distance, shared by all heads. ``t5``:
            a learned bias b for each head and bucket of distances, see
            :func:`stateline.ops.positions.t5_buckets`.
        includes_self: Whether a position sees itself; if not, the window ends right before it.
        blocks: Whether windows start at the boundaries of blocks of ``window`` positions.
        qk_norm: Whether queries and keys have unit length and a learned scale per head, initially
            1, replaces :math:`1 / \sqrt d`; the scale also multiplies the biases. Not with
            ``score_scale``. Or how they are normalised:
            :class:`~stateline.layers.mixers.heads.Rms`,
            :class:`~stateline.layers.mixers.heads.Offset`.
    """

    window: Count = 128
    position: Literal["none", "alibi", "relative", "t5"] | Rope = "none"
    includes_self: bool = True
    blocks: bool = False
    qk_norm: bool | Rms | Offset = False

    def __post_init__(self) -> None:
        if self.qk_norm is True and self.score_scale is not None:
            raise InputError("qk_norm learns the scale of the scores: leave score_scale out")


class SlidingAttention(SoftmaxHeads, AttendsToContext):
    r"""Multi-head causal attention in which a position sees the last ``window`` positions.

    .. math::
        y_i = W_o \left[ \sum_{i - w < j \le i}
        \mathrm{softmax}_j\!\left(\frac{q_i \cdot (k_j + p_{i-j})}{\sqrt d} + b_{i-j}\right) v_j
        \right]_h

    The state is a cache of the window and has a constant size, as the memory of a Transformer-XL.
    Cost and memory of ``forward`` are linear in the length.

    With ``blocks``, windows start at block boundaries: a position sees its own block of w positions
    up to itself, and the whole block before. So it sees between w + 1 and 2 w positions.

    Differs from Transformer-XL training code, which keeps the inputs of a layer and projects them
    again in every segment. Keys and values are kept here, which is the same function without the
    gradient that W_k and W_v would get through the memory.

    Args:
        d_model: Width of input and output.
        **settings: See :class:`~stateline.layers.mixers.sliding_attention.SlidingSettings`.

    Raises:
        InputError: If the numbers of heads do not fit each other or ``d_model``, the window is
            empty, or the position scheme is unknown.

    References:
        Dai et al., "Transformer-XL", 2019; Shaw et al., 2018, for ``relative``; Ju et al., 2021,
        for its use in ladders and staircases; ``t5`` with ``qk_norm`` and without self: the
        sliding window of Hutchins et al., "Block-Recurrent Transformers", 2022.
    """

    settings: SlidingSettings
    per_head = "scale", "bucket_bias"

    def __init__(self, d_model: int, **settings: Any) -> None:
        super().__init__(d_model, **settings)
        its = self.settings
        self.n_heads, self.position, self.blocks = its.n_heads, its.position, its.blocks
        self.window, self.includes_self = its.window, its.includes_self
        self.n_kv_heads, self.d_head = its.sizes(d_model)
        self.rotary, self.dropout = its.rotary(self.d_head), Dropout(its.dropout)
        width = its.n_heads * self.d_head
        self.q_proj = Linear(d_model, width, bias=its.has_bias("qkv"), heads=self.n_heads)
        keys, count = self.n_kv_heads * self.d_head, self.n_kv_heads
        self.kv_proj = Linear(d_model, [keys] * 2, bias=its.has_bias("qkv"), heads=count)
        self.out_proj = Linear(width, d_model, bias=its.has_bias("out"))
        self._kv_shape = (2, self.n_kv_heads, self.d_head)
        self.position_keys: nn.Parameter | None = None
        if its.position == "relative":
            self.position_keys = nn.Parameter(torch.randn(self.reach, self.d_head))
        self.bucket_bias: nn.Parameter | None = None
        if its.position == "t5":
            self.bucket_bias = nn.Parameter(torch.randn(its.n_heads, _BUCKETS) * d_model**-0.5)
        self.scale = nn.Parameter(torch.ones(its.n_heads)) if its.qk_norm is True else None
        norm = None if isinstance(its.qk_norm, bool) else its.qk_norm
        self.q_norm = None if norm is None else norm.norm(its.n_heads, self.d_head)
        self.k_norm = None if norm is None else norm.norm(self.n_kv_heads, self.d_head)

    @property
    def first_maps(self) -> Sequence[nn.Linear]:
        """A map to queries, and one to keys and values."""
        return [self.q_proj, self.kv_proj]

    @override
    def within(self, window: int) -> "SlidingAttention | None":
        if self.blocks:
            return None
        layer = copy(self)
        layer.window = min(window, self.window)
        if self.position_keys is not None:
            layer._parameters = dict(self._parameters)
            layer.position_keys = nn.Parameter(self.position_keys[: layer.window])
        return layer

    @property
    def reach(self) -> int:
        """Largest number of positions that a position sees."""
        return 2 * self.window - (not self.includes_self) if self.blocks else self.window

    @property
    def span(self) -> int:
        """Largest number of earlier positions that a position sees."""
        return self.reach - self.includes_self

    def init_state(self, batch_size: int, *, capacity: int = 0) -> SlidingAttentionState:  # noqa: ARG002
        """Empty cache.

        With a ``length`` of 2 ``window``, it is full of zeros that take part in the softmax, as in
        Transformer-XL and Block-Recurrent training code.
        """
        free = zeros(self.q_proj.weight, batch_size, self.span, *self._kv_shape[1:])
        length = torch.zeros(batch_size, dtype=torch.int64, device=free.device)
        return SlidingAttentionState(free, free.clone(), length)

    @override
    def forward(self, x: Tensor) -> Tensor:
        if not x.shape[1]:
            return x
        positions = torch.arange(x.shape[1], device=x.device)[None]
        return self._attend(self._queries(x, positions), self.project_context(x, positions), None)

    @override
    def forward_chunk(
        self, x: Tensor, state: SlidingAttentionState
    ) -> tuple[Tensor, SlidingAttentionState]:
        positions = state.length[:, None] + torch.arange(x.shape[1], device=x.device)
        y, seen = self.attend(x, positions, Context(state.k, state.v), state.length)
        return y, SlidingAttentionState(*seen.with_slots(self.span), state.length + x.shape[1])

    def project_context(self, x: Tensor, positions: Tensor) -> Context:
        """Keys and values of given vectors."""
        k, v = self.kv_proj(x).unflatten(-1, self._kv_shape).unbind(dim=2)
        k = k if self.scale is None else unit_length(k)
        k = k if self.k_norm is None else self.k_norm(k)
        return Context(self.rotated(positions, k)[0], v)

    @property
    def past_visible(self) -> float:
        """Number of positions in the window before the own one."""
        return float(self.span)

    def context_flops(self) -> float:
        """The projection of keys and values."""
        return 2.0 * self.kv_proj.weight.numel()

    def attend(
        self,
        x: Tensor,
        positions: Tensor,
        context: Context,
        valid: Tensor,
        *,
        to_itself: bool = True,
    ) -> tuple[Tensor, Context]:
        """Attend to the context and to the input itself, within the window."""
        first = (context.slots - valid).clamp(min=0)
        if to_itself:
            context = context.then(self.project_context(x, positions))
        nearest = 0 if to_itself else 1
        phase = positions[:, 0] % self.window if self.blocks and x.shape[1] else None
        y = self._attend(self._queries(x, positions), context, first, nearest, phase)
        return y, context

    def flops_per_token(self, length: int) -> float:
        """Linear maps, and scores and weighted sums within the window."""
        seen = self._earlier(length) / length + self.includes_self
        return super().flops_per_token(length) + 4.0 * self.n_heads * self.d_head * seen

    def _earlier(self, length: int) -> float:
        """Pairs of a position below ``length`` and an earlier one that it sees."""
        if not self.blocks:
            return length * mean_visible(length, self.span) if length else 0.0
        whole, rest = divmod(length, self.window)
        own = whole * self.window * (self.window - 1) + rest * (rest - 1)
        return own / 2 + self.window * max(0, length - self.window)

    def _queries(self, x: Tensor, positions: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.n_heads, self.d_head))
        q = scaled_queries(q if self.q_norm is None else self.q_norm(q), self.scale)
        return self.rotated(positions, scaled(q, self.settings.score_scale, self.rotary))[0]

    def _attend(
        self,
        q: Float[Tensor, "batch length head d_head"],
        seen: Context,
        free: Int[Tensor, " batch"] | None,
        nearest: int = 0,
        phase: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """Attend to slots; the last slot lies ``nearest`` positions before the last query."""
        bias = self._bias(q)
        skipped, keys = nearest - (not self.includes_self), self.position_keys
        if skipped < 0:  # the last slot belongs to the last query, which does not see itself
            seen = Context(*(F.pad(t, (0, 0, 0, 0, 1, -1)) for t in seen))
            none = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
            free = 1 + (none if free is None else free)
        window = LocalWindow(
            self.reach - max(skipped, 0),
            free,
            bias if bias is None or skipped <= 0 else bias[:, skipped:],
            keys if keys is None or skipped <= 0 else keys[skipped:],
            self.window if self.blocks else None,
            phase,
            self.settings.soft_cap,
        )
        heads = local_attention(q, *seen, window, self.dropout.rate)
        return self.out_proj(heads.flatten(2))

    def _bias(self, q: Tensor) -> Float[Tensor, "head reach"] | None:
        """Bias of the scores at each distance."""
        distance = torch.arange(self.reach, device=q.device) + (not self.includes_self)
        if self.position == "alibi":
            bias = -alibi_slopes(self.n_heads, q.device).to(q.dtype)[:, None] * distance
        elif self.bucket_bias is not None:
            bias = self.bucket_bias[:, t5_buckets(distance, n_buckets=_BUCKETS)]
        else:
            return None
        return bias if self.scale is None else bias * self.scale[:, None]
