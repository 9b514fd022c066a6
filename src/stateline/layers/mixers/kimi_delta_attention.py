"""Kimi Delta Attention: the gated delta rule with a decay for each entry of a key."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stateline.layers.base import zeros
from stateline.layers.decoder import prepared
from stateline.layers.linear import Linear
from stateline.layers.mixers.convolved import ConvolvedHeads
from stateline.layers.mixers.gated_delta_net import GatedDeltaNetState
from stateline.layers.mixers.heads import head_sizes
from stateline.layers.mixers.short_conv import ShortConv
from stateline.layers.mixers.step_sizes import initial_step_bias
from stateline.layers.norm import RMSNorm, unit_length
from stateline.ops import DeltaSignals, delta_rule, delta_rule_step, delta_rule_step_
from stateline.ops.delta_rule import CHUNK
from stateline.settings import Count, NotNegative


class KimiDeltaAttention(ConvolvedHeads):
    r"""Multi-head linear attention by the delta rule with a decay per entry of the keys (KDA).

    .. math::
        S_t = (I - \beta_t k_t k_t^\top)\, \mathrm{diag}(\alpha_t) S_{t-1} + \beta_t k_t v_t^\top,
        \qquad
        y = W_o \left[ \mathrm{norm}(S_t^\top q_t / \sqrt{d_k}) \odot \sigma(z_t) \right]_h

    Queries, keys and values are projections after a short convolution and SiLU; queries and keys
    are scaled to unit length. :math:`\beta = \sigma(W_\beta x)` is a number per head, and
    :math:`\alpha = \exp(-e^{a_h}\, \mathrm{softplus}(W_2 W_1 x + b))` has an entry for each entry
    of the keys. The maps to :math:`\alpha` and to the gate z have a low rank. The parameters of the
    decay and the state stay float32 under a cast to half precision.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads; must divide ``d_model`` unless ``d_head`` is given.
        d_head: Width of queries, keys and values of a head; by default ``d_model / n_heads``.
        rank: Rank of the maps to the decays and to the gate; by default ``d_head``.
        d_conv: Taps of the convolution.
        norm_eps: Added to the mean square in the norm.

    Raises:
        InputError: If the heads do not fit the width, or a size is not positive.

    References:
        Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025, section 3.
    """

    ops = delta_rule, delta_rule_step, delta_rule_step_
    optimizer_groups: ClassVar[Mapping[str, str]] = {"a_log": "no_decay", "dt_bias": "no_decay"}

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: Count = 4,
        d_head: Count | None = None,
        rank: Count | None = None,
        d_conv: Count = 4,
        norm_eps: NotNegative = 1e-5,
    ) -> None:
        super().__init__(d_model)
        _, self.d_head = head_sizes(d_model, n_heads, None, d_head)
        self.rank = self.d_head if rank is None else rank
        self.n_heads, self.d_conv, self.norm_eps = n_heads, d_conv, norm_eps
        inner = n_heads * self.d_head
        self.in_proj = Linear(
            d_model,
            [inner] * 3 + [self.rank, n_heads, self.rank],
            bias=False,
            heads=[n_heads] * 3 + [1] * 3,
        )
        self.conv = ShortConv(3 * inner, taps=d_conv, bias=False)
        self.decay_proj = Linear(self.rank, inner, bias=False)
        self.gate_proj = Linear(self.rank, inner, bias=False)
        self.dt_bias = nn.Parameter(initial_step_bias(inner))
        self.a_log = nn.Parameter(torch.empty(n_heads).uniform_(1, 16).log())
        self.norm = RMSNorm(self.d_head, eps=norm_eps)
        self.out_proj = Linear(inner, d_model, bias=False)

    @property
    def head_shape(self) -> Sequence[tuple[int, int]]:
        """The same for all three."""
        return [(self.n_heads, self.d_head)] * 3

    def init_state(self, batch_size: int, *, capacity: int = 0) -> GatedDeltaNetState:  # noqa: ARG002
        """Zero state."""
        s = zeros(self.a_log, batch_size, self.n_heads, self.d_head, self.d_head)
        return GatedDeltaNetState(self.conv.init_state(batch_size), s)

    def flops_per_token(self, length: int) -> float:
        """Linear maps, convolution, products with the state, and the system of a chunk."""
        inner = self.n_heads * self.d_head
        inside = min(length, CHUNK) * 15.0 * inner
        return super().flops_per_token(length) + inside + 8.0 * self.d_head * inner

    @prepared
    def rate(self) -> Float[Tensor, "head 1"]:
        """Decay rate of each head per unit of step."""
        return self.a_log.exp()[:, None]

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """The input of the convolution, logarithms of the decays, beta (..., head, 1), and gate."""
        sizes = [self.conv.d_model, self.rank, self.n_heads, self.rank]
        mixed, low, beta, gate = self.in_proj(x).split(sizes, dim=-1)
        steps = F.softplus(self.decay_proj(low) + self.dt_bias)
        log_decay = -self.rate() * steps.unflatten(-1, (self.n_heads, self.d_head))
        return mixed, log_decay, beta.sigmoid()[..., None], self.gate_proj(gate)

    def signals(
        self, mixed: Tensor, log_decay: Tensor, beta: Tensor, gate: Tensor
    ) -> tuple[Sequence[DeltaSignals], tuple[Tensor, ...]]:
        """What the op takes: the old value at a key is read after the decay, and removed there."""
        q, k, v = mixed.unflatten(-1, (3, self.n_heads, self.d_head)).unbind(dim=-3)
        q, k = unit_length(q) * self.d_head**-0.5, unit_length(k)
        written = beta * k
        return [DeltaSignals(q, written, v, log_decay, log_decay.exp() * k, -written)], (gate,)

    def read(self, y: Tensor, gate: Tensor) -> Tensor:
        """Normalise each head, and gate."""
        normed = self.norm(y.to(self.norm.weight.dtype)).flatten(-2)
        return self.out_proj(normed.to(gate.dtype) * gate.sigmoid())
