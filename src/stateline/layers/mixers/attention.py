"""Causal softmax attention with a growing key-value cache."""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import zeros
from stateline.layers.context import AttendsToContext, Context
from stateline.layers.decoder import prepared
from stateline.layers.documents import Documents
from stateline.layers.dropout import Dropout
from stateline.layers.linear import Linear, scaled_linear
from stateline.layers.mixers.heads import (
    HeadSettings,
    Joint,
    MixesValues,
    Offset,
    Rms,
    Rope,
    SoftmaxHeads,
    appended,
    joined,
    scaled,
    weights_of,
)
from stateline.ops import (
    AttentionCache,
    AttentionMask,
    LocalWindow,
    attention,
    attention_step_,
    local_attention,
)
from stateline.ops.attention import OP
from stateline.ops.dispatch import kernels_run, preferred
from stateline.ops.positions import alibi_slopes, hard_alibi_windows
from stateline.settings import Choice, Size


@dataclass(frozen=True, kw_only=True)
class HardAlibi(Choice):
    """Head h of the first heads sees its own position and h earlier ones (h = 0, 1, ...).

    Attributes:
        masked_heads: Number of these heads, by default half; the other heads see all.
    """

    owner = "hard_alibi"
    masked_heads: Size | None = None


class AttentionState(NamedTuple):
    """Keys and values so far: slot j holds position j; the slots after ``length`` are free."""

    k: Float[Tensor, "batch slot kv_head d_head"]
    v: Float[Tensor, "batch slot kv_head d_head"]
    length: Int[Tensor, " batch"]

    @staticmethod
    def cat(states: Sequence["AttentionState"]) -> "AttentionState":
        """Join rows of different lengths; shorter rows get free slots."""
        k, v, length = zip(*states, strict=True)
        return AttentionState(joined(k), joined(v), torch.cat(length))

    @staticmethod
    def trim(state: "AttentionState") -> "AttentionState":
        """Drop the slots that no row has filled."""
        used = int(state.length.max()) if len(state.length) else 0
        return AttentionState(state.k[:, :used], state.v[:, :used], state.length)


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(HeadSettings):
    r"""Settings of :class:`~stateline.layers.Attention`.

    It has the settings of :class:`~stateline.layers.mixers.heads.HeadSettings`, too.

    Attributes:
        position: Position scheme. ``none``: only the causal mask. ``rope``: rotary embedding, see
            :class:`~stateline.layers.mixers.heads.Rope`. ``alibi``: a penalty linear in the
            distance. ``hard_alibi``: windows, see :class:`HardAlibi`.
        qk_norm: How queries and keys are normalised before the rotation: see
            :class:`~stateline.layers.mixers.heads.Rms`, which ``True`` means,
            :class:`~stateline.layers.mixers.heads.Offset` and
            :class:`~stateline.layers.mixers.heads.Joint`.
        gated: Whether each head's output is multiplied by the sigmoid of another projection of the
            input, whose rows follow the queries of the head.
        out_scale: Constant factor of the output.
    """

    position: Literal["none", "alibi"] | Rope | HardAlibi = "none"
    qk_norm: bool | Rms | Offset | Joint = False
    gated: bool = False
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.qk_norm is True:
            object.__setattr__(self, "qk_norm", Rms())


class Attention(SoftmaxHeads, AttendsToContext, MixesValues):
    r"""Multi-head causal attention.

    .. math::
        y_i = W_o \left[ \sum_{j \le i}
        \mathrm{softmax}_j(q_i \cdot k_j / \sqrt d + b_{ij})\, v_j \right]_h

    The state is the cache of all keys and values, so it grows with the length; so does the cost of
    a step.

    Args:
        d_model: Width of input and output.
        **settings: See :class:`~stateline.layers.mixers.attention.AttentionSettings`.

    Raises:
        InputError: If the numbers of heads do not fit each other or ``d_model``, an option does not
            fit the heads, or the position scheme is unknown.

    References:
        Vaswani et al., 2017; positions: see :mod:`stateline.ops.positions`; grouped queries:
        Ainslie et al., "GQA", 2023; ``qk_norm``: Yang et al., "Qwen3 Technical Report", 2025.
    """

    settings: AttentionSettings
    visible: int | None = None
    """Most positions that a head sees, if not all."""

    def __init__(self, d_model: int, **settings: Any) -> None:
        super().__init__(d_model, **settings)
        its = self.settings
        self.n_heads = its.n_heads
        self.n_kv_heads, self.d_head = its.sizes(d_model)
        self.rotary, self.dropout = its.rotary(self.d_head), Dropout(its.dropout)
        if isinstance(its.position, HardAlibi) and (its.position.masked_heads or 0) > its.n_heads:
            raise InputError(
                f"masked_heads must be from 0 to n_heads={its.n_heads}, got "
                f"{its.position.masked_heads}"
            )
        heads, turns = [its.n_heads, self.n_kv_heads, self.n_kv_heads], [1 + its.gated, 1, 1]
        widths = [n * count * self.d_head for n, count in zip(heads, turns, strict=True)]
        self.qkv = Linear(d_model, widths, bias=its.has_bias("qkv"), heads=heads, turns=turns)
        norm = None if isinstance(its.qk_norm, bool) else its.qk_norm
        self.q_norm = None if norm is None else norm.norm(its.n_heads, self.d_head)
        self.k_norm = None if norm is None else norm.norm(self.n_kv_heads, self.d_head)
        out = (d_model, its.out_scale)
        self.out_proj = scaled_linear(its.n_heads * self.d_head, out, bias=its.has_bias("out"))

    def init_state(self, batch_size: int, *, capacity: int = 0) -> AttentionState:
        """Empty cache with ``capacity`` free slots."""
        free = zeros(self.qkv.weight, batch_size, capacity, self.n_kv_heads, self.d_head)
        length = torch.zeros(batch_size, dtype=torch.int64, device=free.device)
        return AttentionState(free, free.clone(), length)

    def resets(self, x: Tensor, state: AttentionState | None = None) -> bool:
        """Whether the kernel skips scores between documents; a cache holds only the last one."""
        plain = not self.dropout.rate and self.settings.soft_cap is None
        runs = plain and kernels_run(OP, x.device.type)
        return state is None and (runs or preferred("attention") == "flex")

    @override
    def forward(self, x: Tensor, starts: Documents | None = None) -> Tensor:
        positions, first = torch.arange(x.shape[1], device=x.device)[None], None
        if starts is not None:
            first = positions - starts.positions
            positions = starts.positions
        q, k, v, gate = self._project(x, positions)
        mask = AttentionMask(None, *self.scheme(), first, self.settings.soft_cap)
        return self._merge(attention(q, k, v, mask, self.dropout.rate), gate)

    @override
    def forward_chunk(self, x: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        length = x.shape[1]
        positions = state.length[:, None] + torch.arange(length, device=x.device)
        q, k, v, gate = self._project(x, positions)
        keys, values = (appended(*pair, state.length) for pair in ((state.k, k), (state.v, v)))
        start = state.length if state.k.shape[1] else None  # without slots, a plain mask is faster
        mask = AttentionMask(start, *self.scheme(), None, self.settings.soft_cap)
        y = self._merge(attention(q, keys, values, mask, self.dropout.rate), gate)
        return y, AttentionState(keys, values, state.length + length)

    @override
    def step_(self, x: Tensor, state: AttentionState) -> Tensor:
        q, k, v, gate = self._project(x)
        mask = AttentionMask(None, *self.scheme(), None, self.settings.soft_cap)
        frequency = None if self.rotary is None else self.frequency()
        y = attention_step_(q, k, v, AttentionCache(*state), mask, frequency, self.dropout.rate)
        return self._merge(y, gate)

    def project_context(self, x: Tensor, positions: Tensor) -> Context:
        """Keys and values of given vectors."""
        _, k, v, _ = self._project(x, positions)
        return Context(k, v)

    def mixing(self, x: Tensor) -> Tensor:
        """The weights of the softmax, without dropout."""
        q, k, v, _ = self._project(x, torch.arange(x.shape[1], device=x.device)[None])
        mask = AttentionMask(None, *self.scheme())
        return weights_of(lambda values: attention(q, k, values, mask), v)

    @property
    def first_maps(self) -> Sequence[nn.Linear]:
        """One map to all, in which the gate of a head follows its queries."""
        return [self.qkv]

    @override
    def within(self, window: int) -> "Attention":
        layer = copy(self)
        layer.visible = window
        return layer

    past_visible = math.inf

    def context_flops(self) -> float:
        """The product with the joint projection of queries, keys and values."""
        return 2.0 * self.qkv.weight.numel()

    def attend(
        self,
        x: Tensor,
        positions: Tensor,
        context: Context,
        valid: Tensor,
        *,
        to_itself: bool = True,
    ) -> tuple[Tensor, Context]:
        """Attend to a context and causally to the input itself."""
        first = context.slots - valid.clamp(max=context.slots)
        q, k, v, gate = self._project(x, positions)
        nearest = 0 if to_itself else 1
        if to_itself:
            context = context.then(Context(k, v))
        bias = self._bias(torch.arange(nearest, nearest + context.slots, device=x.device))
        window = LocalWindow(context.slots, first, bias, soft_cap=self.settings.soft_cap)
        heads = local_attention(q, *context, window, self.dropout.rate)
        return self._merge(heads, gate), context

    def flops_per_token(self, length: int) -> float:
        """Linear maps, and scores and weighted sums over (length + 1) / 2 keys on average."""
        mixing = 2.0 * self.n_heads * self.d_head * (length + 1)
        return super().flops_per_token(length) + mixing

    def _project(
        self, x: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values and the input of the gate, each (batch, *length, head, d_head).

        Without positions, nothing is rotated.
        """
        width, gate, joint = self.n_kv_heads * self.d_head, None, self.qkv(x)
        parts = joint.split_with_sizes([joint.shape[-1] - 2 * width, width, width], dim=-1)
        d = self.d_head
        q, k, v = [part.view(*x.shape[:-1], part.shape[-1] // d, d) for part in parts]
        if self.settings.gated:
            q, gate = q.view(*x.shape[:-1], self.n_heads, 2, d).unbind(dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            if isinstance(self.settings.qk_norm, Joint):
                q = self.q_norm(q.flatten(-2)).view_as(q)
                k = self.k_norm(k.flatten(-2)).view_as(k)
            else:
                q, k = self.q_norm(q), self.k_norm(k)
        if positions is not None:
            q, k = self.rotated(positions, q, k)
        return scaled(q, self.settings.score_scale, self.rotary), k, v, gate

    @prepared
    def scheme(self) -> tuple[Tensor | None, Tensor | None]:
        """Slopes and windows of the heads, where the position scheme has them."""
        slopes = windows = None
        weight = self.out_proj.weight
        position = self.settings.position
        if position == "alibi":
            slopes = alibi_slopes(self.n_heads, weight.device).to(weight.dtype)
        elif isinstance(position, HardAlibi):
            given = position.masked_heads
            masked = self.n_heads // 2 if given is None else given
            windows = hard_alibi_windows(self.n_heads, masked, weight.device)
        if self.visible is not None:
            every = torch.full((self.n_heads,), self.visible, device=weight.device)
            windows = every if windows is None else windows.clamp(max=self.visible)
        return slopes, windows

    def _bias(self, distance: Int[Tensor, " slot"]) -> Float[Tensor, "head slot"] | None:
        """Bias of the scores at each distance."""
        slopes, windows = self.scheme()
        if slopes is not None:
            return -slopes[:, None] * distance
        if windows is not None:
            bias = torch.zeros(self.n_heads, len(distance), device=distance.device)
            return bias.masked_fill(distance >= windows[:, None], float("-inf"))
        return None

    def _merge(self, heads: Tensor, gate: Tensor | None) -> Tensor:
        """Output projection of the joined heads."""
        return self.out_proj((heads if gate is None else heads * gate.sigmoid()).flatten(-2))
