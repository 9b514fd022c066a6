"""Attention of tokens to other vectors: context states, or a recurrent state."""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from stateline.layers.dropout import Dropout
from stateline.layers.linear import Linear
from stateline.layers.mixers.sliding_attention import SlidingAttention
from stateline.layers.norm import scaled_queries, unit_length
from stateline.ops.containment import known_finite
from stateline.settings import Count, Fraction, Settings


@dataclass(frozen=True, kw_only=True)
class TokenSettings(Settings):
    r"""Settings of how tokens attend, to each other in a window and to other vectors.

    Attributes:
        n_heads: Number of heads of both attentions; must divide ``d_model`` unless a width of the
            heads is given.
        window: Length of a block, and window of the sliding attention.
        includes_self: Whether the sliding attention sees the position itself.
        qk_norm: Whether queries and keys have unit length and a learned scale :math:`\lambda` per
            head replaces :math:`1 / \sqrt d`.
        dropout: Probability that a weight of the tokens' attention is dropped in training.
    """

    n_heads: Count = 4
    window: Count = 128
    includes_self: bool = False
    qk_norm: bool = True
    dropout: Fraction = 0.0

    def attentions(
        self, d_model: int, d_head: int | None = None
    ) -> "tuple[SlidingAttention, CrossAttention]":
        """Attention of tokens to each other, and to other vectors."""
        own = [field.name for field in fields(TokenSettings)]
        shared = {name: getattr(self, name) for name in own} | {"d_head": d_head}
        local = SlidingAttention(d_model, position="t5", **shared)
        cross = CrossAttention(
            d_model, n_heads=self.n_heads, d_head=d_head, qk_norm=self.qk_norm, dropout=self.dropout
        )
        return local, cross


class CrossAttention(nn.Module):
    r"""Queries of tokens for given keys and values.

    .. math:: y_i = W_o \left[ \sum_s \mathrm{softmax}_s(q_i \cdot k_s / \sqrt d)\, v_s \right]_h

    Args:
        d_model: Width of the tokens.
        n_heads: Number of heads.
        d_head: Width of a head; by default ``d_model / n_heads``.
        qk_norm: Whether queries and keys have unit length and a learned scale per head, initially
            1, replaces :math:`1 / \sqrt d`.
        dropout: Probability that an attention weight is dropped in training.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int,
        d_head: int | None = None,
        qk_norm: bool,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.n_heads, self.d_head = n_heads, d_head or d_model // n_heads
        width = n_heads * self.d_head
        self.q_proj = Linear(d_model, width, bias=False)
        self.out_proj = Linear(width, d_model, bias=False)
        self.scale = nn.Parameter(torch.ones(n_heads)) if qk_norm else None

    def queries(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch head d_head"]:
        """Queries of the tokens."""
        return scaled_queries(self.q_proj(x).unflatten(-1, (self.n_heads, self.d_head)), self.scale)

    def keys(self, k: Float[Tensor, "*batch head d_head"]) -> Float[Tensor, "*batch head d_head"]:
        """Keys, of unit length with ``qk_norm``."""
        return k if self.scale is None else unit_length(k)

    def merge(self, heads: Float[Tensor, "*batch head d_head"]) -> Float[Tensor, "*batch d_model"]:
        """Output projection of the joined heads."""
        return self.out_proj(heads.flatten(-2))


def attend_to_all(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch slot head d_head"],
    v: Float[Tensor, "batch slot head d_head"],
    seen: Bool[Tensor, "batch slot"] | None = None,
    *,
    dropout: float = 0.0,
) -> Float[Tensor, "batch query head d_head"]:
    """Attention of every query of a row to every visible slot of the row.

    A query that is not finite has no share in the gradients of keys and values: other queries,
    of earlier tokens, read them, too.
    """
    if not known_finite(q):
        lost = ~q.isfinite().all(dim=-1, keepdim=True)
        found = _attend(q.masked_fill(lost, 0), k, v, seen, dropout)
        return found.masked_fill(lost, torch.nan)
    return _attend(q, k, v, seen, dropout)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, dropout: float) -> Tensor:
    mask = None if seen is None else seen[:, None, None, :]
    queries, keys, values = (t.to(q.dtype).transpose(1, 2) for t in (q, k, v))
    found = F.scaled_dot_product_attention(queries, keys, values, mask, dropout)
    return found.transpose(1, 2)


def attend_by_block(
    q: Float[Tensor, "batch length head d_head"],
    k: Float[Tensor, "batch block slot head d_head"],
    v: Float[Tensor, "batch block slot head d_head"],
    phase: Int[Tensor, " batch"],
    block_len: int,
    *,
    dropout: float = 0.0,
) -> Float[Tensor, "batch length head d_head"]:
    """Attention of every query to all slots of its own block.

    Args:
        q: Queries.
        k: Keys of each block that some row reaches.
        v: Values of the same blocks.
        phase: Offset of each row's first query in its block.
        block_len: Number of queries in a block.
        dropout: Probability that a weight is dropped.
    """
    (batch, length), blocks = q.shape[:2], k.shape[1]
    if length == 1:
        return attend_to_all(q, k[:, 0], v[:, 0], dropout=dropout)
    row = torch.arange(batch, device=q.device)[:, None]
    query = torch.arange(blocks * block_len, device=q.device) - phase[:, None]
    laid = q[row, query.clamp(0, length - 1)].unflatten(1, (blocks, block_len))
    found = attend_to_all(*(t.flatten(0, 1) for t in (laid, k, v)), dropout=dropout)
    place = phase[:, None] + torch.arange(length, device=q.device)
    return found.unflatten(0, (batch, blocks)).flatten(1, 2)[row, place]
