"""Lightning attention: linear attention with a fixed decay per head, as in MiniMax-01."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stateline.layers.decoder import prepared
from stateline.layers.linear import Linear
from stateline.layers.mixers.heads import head_sizes
from stateline.layers.mixers.linear_attention import MatrixAttention
from stateline.layers.norm import RMSNorm
from stateline.settings import Count, NotNegative


class LightningAttention(MatrixAttention):
    r"""Multi-head linear attention with a fixed decay per head.

    .. math::
        S_t = e^{-s_h} S_{t-1} + k_t v_t^\top, \qquad
        y = W_o \left( \mathrm{norm}([S_t^\top q_t]_h) \odot \sigma(z_t) \right)

    Queries, keys and values are projections after SiLU. Head h = 1, ..., H decays at the rate
    :math:`s_h = c\, 2^{-8 h / H}` per token, with c = ``decay_scale``; for a power of two H, these
    are the slopes of ALiBi times c. The norm divides by the root mean square over all heads.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads; must divide ``d_model`` unless ``d_head`` is given.
        d_head: Width of a head; by default ``d_model / n_heads``.
        decay_scale: Factor c of the rates, not negative. MiniMax-01 lets it fall from 1 in the
            first layer to nearly 0 in the last.
        norm_eps: Added to the mean square in the norm.

    Raises:
        InputError: If the heads do not fit the width, or the factor is negative.

    References:
        Qin et al., "Various Lengths, Constant Speed: Efficient Language Modeling with Lightning
        Attention", ICML 2024, section 3; gate and norm: MiniMax, "MiniMax-01", 2025,
        section 2.2.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: Count = 4,
        d_head: Count | None = None,
        decay_scale: NotNegative = 1.0,
        norm_eps: NotNegative = 1e-6,
    ) -> None:
        _, self.d_head = head_sizes(d_model, n_heads, None, d_head)
        super().__init__(d_model, n_heads, self.d_head, self.d_head)
        self.decay_scale, self.norm_eps = decay_scale, norm_eps
        self.qkv = Linear(d_model, 3 * n_heads * self.d_head, bias=False, heads=n_heads, turns=3)
        self.gate_proj = Linear(d_model, n_heads * self.d_head, bias=False)
        self.norm = RMSNorm(n_heads * self.d_head, eps=norm_eps)
        self.out_proj = Linear(n_heads * self.d_head, d_model, bias=False)

    @prepared
    def log_decay(self) -> Float[Tensor, " head"]:
        """Logarithms of the decays, in float32 at least."""
        weight = self.qkv.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        heads = torch.arange(1, self.n_heads + 1, device=weight.device, dtype=dtype)
        return -self.decay_scale * torch.exp2(-8 * heads / self.n_heads)

    def signals(self, x: Tensor, *_: Any) -> tuple[Any, ...]:
        """Queries, keys, values, the decays of the heads, and the gate."""
        joint = F.silu(self.qkv(x)).unflatten(-1, (self.n_heads, 3, self.d_head))
        q, k, v = joint.unbind(dim=-2)
        return q, k, v, self.log_decay().expand(v.shape[:-1]), self.gate_proj(x)

    def read(self, y: Tensor, gate: Tensor) -> Tensor:
        """Normalise all heads together, and gate."""
        return self.out_proj(self.norm(y.flatten(-2)) * gate.sigmoid())
