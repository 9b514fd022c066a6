"""Gated linear attention: each entry of a key decays by a factor that depends on the input."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from stateline.layers.linear import Linear
from stateline.layers.mixers.linear_attention import MatrixAttention, expanded
from stateline.layers.norm import RMSNorm
from stateline.ops.linear_attention import SHORT
from stateline.settings import Count, Factor, NotNegative, Positive


class GatedLinearAttention(MatrixAttention):
    r"""Multi-head linear attention with a decay per entry of the keys (GLA).

    .. math::
        S_t = \mathrm{diag}(\alpha_t) S_{t-1} + k_t v_t^\top, \qquad
        y = W_o \left[ \mathrm{norm}(S_t^\top q_t / \sqrt{d_k}) \odot \mathrm{silu}(z_t) \right]_h

    with :math:`\alpha_t = \sigma(W_2 W_1 x_t + b)^{1/\tau}`, where :math:`W_2 W_1` has a low rank.
    The norm divides by the root mean square over a head.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads, which divides the widths of keys and values.
        expand_k: Width of the keys of all heads, in units of ``d_model``.
        expand_v: Width of the values of all heads, in units of ``d_model``.
        rank: Rank of the map to the decays.
        temperature: The temperature :math:`\tau`: the larger, the slower is the decay.
        norm_eps: Added to the mean square in the norm.

    Raises:
        InputError: If the heads do not fit the widths, or a number is not positive.

    References:
        Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", ICML
        2024, section 4.4.
    """

    chunk = SHORT

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: Count = 4,
        expand_k: Factor = 0.5,
        expand_v: Factor = 1.0,
        rank: Count = 16,
        temperature: Positive = 16.0,
        norm_eps: NotNegative = 1e-5,
    ) -> None:
        d_key, d_value = expanded(d_model, n_heads, expand_k=expand_k, expand_v=expand_v)
        super().__init__(d_model, n_heads, d_key, d_value)
        self.expand_k, self.expand_v, self.rank = expand_k, expand_v, rank
        self.temperature, self.norm_eps = temperature, norm_eps
        self.sizes = [n_heads * d for d in (d_key, d_key, d_value, d_value)] + [rank]
        self.in_proj = Linear(d_model, self.sizes, bias=False, heads=[n_heads] * 4 + [1])
        self.decay_proj = Linear(rank, n_heads * d_key)
        self.norm = RMSNorm(d_value, eps=norm_eps)
        self.out_proj = Linear(n_heads * d_value, d_model, bias=False)

    def signals(self, x: Tensor, *_: Any) -> tuple[Any, ...]:
        """Scaled queries, keys, values, the decays of their entries, and the gate."""
        q, k, v, gate, low = self.in_proj(x).split(self.sizes, dim=-1)
        decay = F.logsigmoid(self.decay_proj(low)) / self.temperature
        q, k, v, decay = (t.unflatten(-1, (self.n_heads, -1)) for t in (q, k, v, decay))
        return q * self.d_key**-0.5, k, v, decay, gate

    def read(self, y: Tensor, gate: Tensor) -> Tensor:
        """Normalise each head, and gate."""
        return self.out_proj(self.norm(y).flatten(-2) * F.silu(gate))
