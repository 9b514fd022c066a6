"""Block-recurrent layer: recurrent state vectors exchange information with blocks of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from typing_extensions import override

from stateline.layers.base import SequenceLayer, accumulates, zeros
from stateline.layers.context import Context
from stateline.layers.linear import Linear
from stateline.layers.mixers.cross_attention import TokenSettings, attend_by_block, attend_to_all
from stateline.layers.norm import scaled_queries, unit_length
from stateline.ops.containment import known_finite
from stateline.ops.kernel_op import values_at_hand
from stateline.settings import Count

Gate = Literal["fixed", "lstm"]
Update = Literal["skip", "dual", "single"]


@accumulates("vectors")
class BlockRecurrentState(NamedTuple):
    """Keys and values of the last two blocks, number of tokens, and the state vectors."""

    k: Float[Tensor, "batch slot head d_head"]
    v: Float[Tensor, "batch slot head d_head"]
    length: Int[Tensor, " batch"]
    vectors: Float[Tensor, "batch vector d_model"]


class GatedUpdate(nn.Module):
    r"""A gate in place of a residual connection: :math:`r \odot g + h \odot (1 - g)` for old r.

    The new h is a linear map of z or, with ``d_hidden``, of :math:`y = \mathrm{relu}(W_1 z)`. The
    gate is a learned constant per entry, :math:`g = \sigma(b)` (``fixed``), or there are two gates
    that depend on y: :math:`r \odot \sigma(W_f y + b_f + 1) + h \odot \sigma(W_i y + b_i - 1)`
    (``lstm``).

    Args:
        d_input: Width of z.
        d_model: Width of r and h.
        gate: ``fixed`` or ``lstm``.
        d_hidden: Width of y; 0 means y = z.
        bounded: Whether tanh is applied to h.
    """

    def __init__(
        self, d_input: int, d_model: int, *, gate: Gate, d_hidden: int = 0, bounded: bool = False
    ) -> None:
        super().__init__()
        self.bounded = bounded
        self.hidden = Linear(d_input, d_hidden, bias=False) if d_hidden else None
        width = d_hidden or d_input
        self.propose = Linear(width, d_model, bias=False)
        self.keep = nn.Parameter(torch.randn(d_model) * 0.1) if gate == "fixed" else None
        self.gates = Linear(width, [d_model] * 2) if gate == "lstm" else None

    def forward(
        self, r: Float[Tensor, "batch vector d_model"], z: Float[Tensor, "batch vector width"]
    ) -> Float[Tensor, "batch vector d_model"]:
        """The updated state vectors, in the dtype of the old ones."""
        y = z if self.hidden is None else self.hidden(z).relu()
        h = self.propose(y).to(r.dtype)
        h = h.tanh() if self.bounded else h
        if self.gates is None:
            assert self.keep is not None
            return torch.lerp(h, r, self.keep.to(r.dtype).sigmoid())
        forget, enter = self.gates(y).to(r.dtype).chunk(2, dim=-1)
        return r * (forget + 1).sigmoid() + h * (enter - 1).sigmoid()


@dataclass(frozen=True, kw_only=True)
class BlockRecurrentSettings(TokenSettings):
    """Settings of :class:`~stateline.layers.BlockRecurrent`.

    It has the settings of :class:`~stateline.layers.mixers.cross_attention.TokenSettings`, too.

    Attributes:
        n_states: Number of state vectors.
        gate: ``fixed`` (a constant per entry) or ``lstm``: see :class:`GatedUpdate`.
        update: ``skip``: the gated update of the layer. ``dual``: a feed-forward with its own gate
            follows it. ``single``: a feed-forward, bounded by tanh, replaces W.
        d_hidden: Hidden width of that feed-forward; by default 4 ``d_model``.
    """

    n_states: Count = 128
    gate: Gate = "fixed"
    update: Update = "skip"
    d_hidden: Count | None = None


class BlockRecurrent(SequenceLayer[BlockRecurrentState]):
    r"""Sliding attention plus attention to recurrent state vectors, updated once per block.

    Let R be the state vectors before block n, and :math:`\hat R = \mathrm{norm}(R) + E` with a
    learned vector of E for each. The tokens of the block give

    .. math:: y_i = \mathrm{sliding}(x)_i + W_o\,\mathrm{attend}(q'_i, \hat R)

    and at its end the state vectors attend to each other and to the tokens of this block and of the
    one before:

    .. math::
        Z = [\,\mathrm{attend}(Q, \hat R),\ \mathrm{attend}(Q', x_{n-1}, x_n)\,], \qquad
        R \leftarrow \mathrm{gate}(R, W Z)

    Everything that concerns tokens alone, and what tokens read, is computed for all blocks at once;
    the updates are a loop of T / ``window`` iterations. The state has a constant size.

    Args:
        d_model: Width of input and output.
        **settings: See :class:`~stateline.layers.mixers.block_recurrent.BlockRecurrentSettings`.

    Raises:
        InputError: If a size does not fit, or a name is unknown.

    References:
        Hutchins et al., "Block-Recurrent Transformers", NeurIPS 2022, and its code.
    """

    settings: BlockRecurrentSettings
    optimizer_groups: ClassVar[Mapping[str, str]] = {"scales": "no_decay"}

    def __init__(self, d_model: int, **settings: Any) -> None:
        super().__init__(d_model, **settings)
        its = self.settings
        d_hidden = 4 * d_model if its.d_hidden is None else its.d_hidden
        self.window, update, gate = its.window, its.update, its.gate
        self.local, self.cross = its.attentions(d_model)
        self.initial = nn.Parameter(torch.randn(its.n_states, d_model) * 0.1)
        self.ids = nn.Parameter(torch.randn(its.n_states, d_model))
        self.norm = nn.RMSNorm(d_model, eps=1e-6)
        self.qq_proj = Linear(d_model, [d_model] * 2, bias=False, heads=its.n_heads)
        self.kv_proj = Linear(d_model, [d_model] * 2, bias=False, heads=its.n_heads)
        self.scales = nn.Parameter(torch.ones(2, its.n_heads)) if its.qk_norm else None
        hidden = d_hidden if update == "single" else 0
        self.mix = GatedUpdate(
            2 * d_model, d_model, gate=gate, d_hidden=hidden, bounded=update == "single"
        )
        dual = update == "dual"
        self.feed_norm = nn.RMSNorm(d_model, eps=1e-6) if dual else None
        self.feed = GatedUpdate(d_model, d_model, gate=gate, d_hidden=d_hidden) if dual else None

    def init_state(self, batch_size: int, *, capacity: int = 0) -> BlockRecurrentState:  # noqa: ARG002
        """No tokens, and the learned initial state vectors."""
        heads = (self.cross.n_heads, self.cross.d_head)
        k = zeros(self.qq_proj.weight, batch_size, 2 * self.window - 1, *heads)
        length = self.local.init_state(batch_size).length
        vectors = self.initial.to(torch.promote_types(self.initial.dtype, torch.float32))
        return BlockRecurrentState(k, k.clone(), length, vectors.repeat(batch_size, 1, 1))

    @override
    def forward_chunk(
        self, x: Tensor, state: BlockRecurrentState
    ) -> tuple[Tensor, BlockRecurrentState]:
        """Process all tokens at once, around a loop over the updates.

        Rows may be at different offsets in their blocks.
        """
        if not x.shape[1]:
            return x, state
        positions = state.length[:, None] + torch.arange(x.shape[1], device=x.device)
        y, tokens = self.local.attend(x, positions, Context(state.k, state.v), state.length)
        phase = state.length % self.window
        seen, vectors = self._recur(tokens, state, x.shape[1])
        k, v = (torch.stack(t, dim=1) for t in zip(*seen, strict=True))
        heads = attend_by_block(
            self.cross.queries(x), k, v, phase, self.window, dropout=self.cross.dropout.rate
        )
        kept = tokens.with_slots(2 * self.window - 1)
        after = BlockRecurrentState(*kept, state.length + x.shape[1], vectors)
        return y + self.cross.merge(heads), after

    def flops_per_token(self, length: int) -> float:
        """Projections and attentions of a token, and its share of the update of its block."""
        maps = self.cross.q_proj, self.cross.out_proj
        tokens = self.local.flops_per_token(length) + 2.0 * sum(m.weight.numel() for m in maps)
        vectors = super().flops_per_token(length) - tokens
        n_states, pairs = len(self.initial), 4.0 * self.d_model
        scores = pairs * n_states * (n_states + 2 * self.window)
        return tokens + pairs * n_states + (n_states * vectors + scores) / self.window

    def _recur(
        self, tokens: Context, state: BlockRecurrentState, length: int
    ) -> tuple[list[Context], Tensor]:
        """Keys and values of the state vectors before each block, and the vectors after the chunk.

        Rows end their blocks at different times: a row that has not reached an end keeps its
        vectors.
        """
        window, (r, lost) = self.window, _finite(state.vectors)
        phase = state.length % window
        # With gradients, every parameter takes part in every call: distributed training needs it.
        may_look = values_at_hand(r) or (length == 1 and not torch.compiler.is_compiling())
        may_skip = may_look and not torch.is_grad_enabled()
        q, context = self._project(r, tokens.k.dtype)
        seen = [_spoilt(context, lost)]
        for end in range(window, length + window, window):
            stop = end - phase  # tokens of the chunk up to the end of the block
            ended = stop <= length
            if may_skip and not ended.any():
                seen.append(seen[-1])
                continue
            (k, v), there = self._two_blocks(tokens, stop, state.length)
            (k, no_key), (v, no_value) = _finite(k), _finite(v)
            updated = self._updated(r, q, context, Context(k, v), there)
            r = torch.where(ended[:, None, None], updated, r)
            lost = lost | (ended & (no_key | no_value))
            q, context = self._project(r, tokens.k.dtype)
            seen.append(_spoilt(context, lost))
        return seen, r.masked_fill(lost[:, None, None], torch.nan)  # a copy of the given state

    def _two_blocks(
        self, tokens: Context, stop: Int[Tensor, " batch"], before: Int[Tensor, " batch"]
    ) -> tuple[Context, Tensor]:
        """Keys and values of the last two blocks before an end, and a mask of existing tokens."""
        index = torch.arange(2 * self.window, device=stop.device)
        slot = (stop[:, None] - 1 + index).clamp(max=tokens.slots - 1)
        row = torch.arange(stop.shape[0], device=stop.device)[:, None]
        there = (before + stop)[:, None] - 2 * self.window + index >= 0
        return Context(tokens.k[row, slot], tokens.v[row, slot]), there

    def _project(self, r: Tensor, dtype: torch.dtype) -> tuple[Tensor, Context]:
        """Both sets of queries of the state vectors, and their keys and values."""
        vectors = self.norm(r.to(self.ids.dtype)) + self.ids
        split = (2, self.cross.n_heads, self.cross.d_head)
        q = self.qq_proj(vectors).unflatten(-1, split).to(dtype)
        k, v = self.kv_proj(vectors).unflatten(-1, split).to(dtype).unbind(dim=-3)
        if self.scales is None:
            return q, Context(k, v)
        q = torch.stack([scaled_queries(q[:, :, i], self.scales[i]) for i in (0, 1)], dim=2)
        return q, Context(unit_length(k), v)

    def _updated(
        self, r: Tensor, q: Tensor, own: Context, tokens: Context, there: Tensor
    ) -> Tensor:
        """The state vectors after a block."""
        among, across = q.unbind(dim=2)
        found = [attend_to_all(among, *own), attend_to_all(across, *tokens, there)]
        r = self.mix(r, torch.cat([h.flatten(2) for h in found], dim=-1).to(self.ids.dtype))
        if self.feed is None or self.feed_norm is None:
            return r
        return self.feed(r, self.feed_norm(r.to(self.ids.dtype)))


def _finite(x: Tensor) -> tuple[Tensor, Bool[Tensor, " batch"]]:
    """A tensor with zeros in the rows that are not finite, and these rows.

    Gradients flow back through all updates, also those of later blocks: zero times infinity must
    not come up in them.
    """
    if known_finite(x):
        return x, torch.zeros(len(x), dtype=torch.bool, device=x.device)
    lost = ~x.isfinite().flatten(1).all(dim=1)
    return x.masked_fill(lost.view(-1, *[1] * (x.ndim - 1)), 0.0), lost


def _spoilt(context: Context, lost: Bool[Tensor, " batch"]) -> Context:
    """Keys and values of state vectors, NaN in rows that have read something not finite."""
    if values_at_hand(lost) and not lost.any():
        return Context(*context[:2])
    return Context(*(x.masked_fill(lost[:, None, None, None], torch.nan) for x in context[:2]))
