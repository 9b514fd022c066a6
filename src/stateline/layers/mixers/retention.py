"""Retention: linear attention with rotary positions and a fixed decay per head."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import accumulates, records
from stateline.layers.decoder import prepared
from stateline.layers.documents import Documents, count_positions
from stateline.layers.linear import Linear
from stateline.layers.mixers.heads import Rotary, RotatesHeads
from stateline.layers.mixers.linear_attention import MatrixAttention, expanded
from stateline.layers.norm import RMSNorm
from stateline.settings import Count, Factor, NotNegative


@accumulates("s")
class RetentionState(NamedTuple):
    """Decayed sum of products of keys and values, and the number of tokens, for the rotation."""

    s: Float[Tensor, "batch head d_key d_value"]
    length: Int[Tensor, " batch"]


class Retention(MatrixAttention, RotatesHeads):
    r"""Multi-scale retention.

    .. math::
        S_t = \gamma_h S_{t-1} + R_t k_t v_t^\top / \sqrt{d_k}, \qquad
        y = W_o \left[ \mathrm{norm}(S_t^\top R_t q_t) \odot \mathrm{silu}(z_t) \right]_h

    :math:`R_t` rotates pairs of entries by angles proportional to the position t, and head h = 0,
    1, ... decays by :math:`\gamma_h = 1 - 2^{-5-h}` per token. The norm divides by the root mean
    square over a head, as in fla; in the paper it also subtracts the mean.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads, which divides the widths of keys and values.
        expand_v: Width of the values of all heads, in units of ``d_model``.
        norm_eps: Added to the mean square in the norm.

    Raises:
        InputError: If the heads do not fit the widths, or queries are not pairs.

    References:
        Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models", 2023,
        equations 5 to 8.
    """

    # Differs from the official code, which spaces the angles so that the last is 1 / 10,000.

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: Count = 4,
        expand_v: Factor = 2.0,
        norm_eps: NotNegative = 1e-5,
    ) -> None:
        d_key, d_value = expanded(d_model, n_heads, expand_k=1, expand_v=expand_v)
        super().__init__(d_model, n_heads, d_key, d_value)
        if d_key % 2:
            raise InputError(
                f"retention rotates pairs: d_model / n_heads must be even, got {d_key}"
            )
        self.expand_v, self.norm_eps = expand_v, norm_eps
        self.rotary = Rotary(d_key, 10_000.0, None)
        self.in_proj = Linear(
            d_model, [d_model] * 2 + [n_heads * d_value] * 2, bias=False, heads=n_heads
        )
        self.norm = RMSNorm(d_value, eps=norm_eps)
        self.out_proj = Linear(n_heads * d_value, d_model, bias=False)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> RetentionState:
        """Zero state, before position 0."""
        (s,) = super().init_state(batch_size, capacity=capacity)
        return RetentionState(s, torch.zeros(batch_size, dtype=torch.int64, device=s.device))

    @prepared
    def log_decay(self) -> Float[Tensor, " head"]:
        """Logarithms of the decays, in float32 at least."""
        weight = self.in_proj.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        heads = torch.arange(self.n_heads, device=weight.device, dtype=dtype)
        return torch.log1p(-torch.exp2(-5 - heads))

    def signals(
        self, x: Tensor, state: RetentionState, starts: Documents | None = None
    ) -> tuple[Any, ...]:
        """Rotated queries and keys, values, the decays of the heads, the gate and the length."""
        values = self.n_heads * self.d_value
        q, k, v, gate = self.in_proj(x).split([self.d_model, self.d_model, values, values], dim=-1)
        v = v.unflatten(-1, (self.n_heads, self.d_value))
        q, k = (t.unflatten(-1, (self.n_heads, self.d_key)) for t in (q, k))
        tokens = x if x.ndim == 3 else x[:, None]
        positions, length = count_positions(state.length, tokens, starts)
        rows = (t if t.ndim == 4 else t[:, None] for t in (q, k))
        q, k = (turned.view_as(q) for turned in self.rotated(positions, *rows))
        decay = self.log_decay().expand(v.shape[:-1])
        return q, k * self.d_key**-0.5, v, decay, (gate, length)

    def read(self, y: Tensor, gate: tuple[Tensor, Tensor]) -> Tensor:
        """Normalise each head, and gate."""
        return self.out_proj(self.norm(y).flatten(-2) * F.silu(gate[0]))

    def after(
        self,
        state: RetentionState,  # noqa: ARG002
        s: Tensor,
        gate: tuple[Tensor, Tensor],
    ) -> RetentionState:
        """The state after the tokens."""
        return RetentionState(s, gate[1])

    @override
    def step_(self, x: Tensor, state: RetentionState) -> Tensor:
        y = super().step_(x, state)
        if self.decodes or not records(x):  # else it was counted
            state.length.add_(1)
        return y
