"""Gated DeltaNet: linear attention that overwrites the old value of a key, with decay."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import SequenceLayer, accumulates, zeros
from stateline.layers.decoder import prepared
from stateline.layers.linear import Linear
from stateline.layers.mixers.convolved import ConvolvedHeads
from stateline.layers.mixers.finite_filter import FiniteFilterState
from stateline.layers.mixers.heads import head_sizes
from stateline.layers.mixers.short_conv import ShortConv
from stateline.layers.mixers.step_sizes import initial_step_bias
from stateline.layers.norm import RMSNorm, unit_length
from stateline.ops import (
    GatedDeltaSignals,
    gated_delta_rule,
    gated_delta_rule_step,
    gated_delta_rule_step_,
)
from stateline.ops.gated_delta_rule import CHUNK
from stateline.settings import Count, Factor, NotNegative, Positive


@accumulates("s")
class GatedDeltaNetState(NamedTuple):
    """State of the convolution, and the matrix of every head."""

    conv: FiniteFilterState
    s: Float[Tensor, "batch head d_key d_value"]


class GatedDeltaNet(ConvolvedHeads):
    r"""Multi-head linear attention by the gated delta rule.

    .. math::
        S_t = \alpha_t (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top, \qquad
        y = W_o \left[ \mathrm{norm}(S_t^\top q_t) \odot \mathrm{silu}(z_t) \right]_h

    Queries, keys and values are projections after a short convolution and SiLU. Queries and keys
    are scaled to unit length, queries then by ``query_scale``. :math:`\beta = \sigma(W_\beta x)` is
    the fraction of the key's old value that is replaced,
    :math:`\alpha = \exp(-e^a\, \mathrm{softplus}(W_\alpha x + b))` the fraction of the state that
    is kept. The parameters of the decay and the state stay float32 under a cast to half precision.

    ``gated=False`` is DeltaNet: :math:`\alpha = 1`, and the output is :math:`W_o [\mathrm{norm}
    (S_t^\top q_t)]_h`. Give it ``expand_v=1``: its values are as wide as its keys.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads; must divide ``d_model`` unless ``d_key`` is given.
        n_key_heads: Number of heads of queries and keys, which must divide ``n_heads``; by default
            the same. Groups of consecutive heads share them.
        d_key: Width of the queries and keys of a head; by default ``d_model / n_heads``.
        expand_v: Width of the values of a head, in units of ``d_key``.
        d_conv: Taps of the convolution.
        norm_eps: Added to the mean square in the norm.
        n_products: Number of keys n, each with a value and a :math:`\beta`, that a token writes one
            after the other; the state decays before the first and is read after the last. The
            state of a token is then multiplied by a product of n reflections (DeltaProduct).
        reflects: Whether :math:`\beta` reaches 2 in place of 1, so that a key can be reflected.
        query_scale: Factor of the queries; by default :math:`1 / \sqrt{d_k}` for keys of d_k
            entries a head, as in fla and Qwen3-Next. The norm undoes it up to ``norm_eps``. Models
            saved before this keyword existed used 1: ``query_scale=1`` restores that.
        gated: Whether the state decays and the output is gated by :math:`z`.

    Raises:
        InputError: If the heads do not fit the width, a size is not positive, or the scale is not.

    References:
        Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", ICLR
        2025, section 3; ``n_products`` and ``reflects``: Siems et al., "DeltaProduct: Improving
        State-Tracking in Linear RNNs via Householder Products", NeurIPS 2025, section 3;
        ``gated=False``: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over
        Sequence Length", NeurIPS 2024, sections 2.2 and 3.3.
    """

    ops = gated_delta_rule, gated_delta_rule_step, gated_delta_rule_step_
    optimizer_groups: ClassVar[Mapping[str, str]] = {"a_log": "no_decay", "dt_bias": "no_decay"}

    def __init__(  # noqa: PLR0913
        self,
        d_model: int,
        *,
        n_heads: Count = 4,
        n_key_heads: Count | None = None,
        d_key: Count | None = None,
        expand_v: Factor = 2,
        d_conv: Count = 4,
        norm_eps: NotNegative = 1e-5,
        n_products: Count = 1,
        reflects: bool = False,
        query_scale: Positive | None = None,
        gated: bool = True,
    ) -> None:
        super().__init__(d_model)
        n_key_heads, self.d_key = head_sizes(d_model, n_heads, n_key_heads, d_key)
        self.d_value = round(expand_v * self.d_key)
        if self.d_value < 1:
            raise InputError(
                f"expand_v * d_key must be at least 1, got {expand_v=} and d_key={self.d_key}"
            )
        self.n_heads, self.n_key_heads, self.expand_v = n_heads, n_key_heads, expand_v
        self.n_products, self.reflects, self.gated = n_products, reflects, gated
        self.d_conv, self.norm_eps = d_conv, norm_eps
        self.query_scale = self.d_key**-0.5 if query_scale is None else query_scale
        self.d_values = n_heads * self.d_value
        self.d_keys = n_key_heads * self.d_key
        mixed = self.d_keys + n_products * (self.d_keys + self.d_values)
        gates = [self.d_values, n_heads] if gated else [0, 0]
        self.splits = [mixed, *gates, n_products * n_heads]
        heads = [n_key_heads, n_products * n_key_heads, n_products * n_heads]
        widths = [n * d for n, d in zip(heads, (self.d_key, self.d_key, self.d_value), strict=True)]
        widths += self.splits[1:]
        self.in_proj = Linear(d_model, widths, bias=False, heads=[*heads, n_heads, 1, 1])
        self.conv = ShortConv(mixed, taps=d_conv, bias=False)
        if gated:
            self.dt_bias = nn.Parameter(initial_step_bias(n_heads))
            self.a_log = nn.Parameter((16 * (1 - torch.rand(n_heads))).log())
        self.norm = RMSNorm(self.d_value, eps=norm_eps)
        self.out_proj = Linear(self.d_values, d_model, bias=False)

    @property
    def head_shape(self) -> Sequence[tuple[int, int]]:
        """Heads of queries, of the keys and of the values of all products."""
        n, keys = self.n_products, (self.n_key_heads, self.d_key)
        return keys, (n * keys[0], keys[1]), (n * self.n_heads, self.d_value)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> GatedDeltaNetState:  # noqa: ARG002
        """Zero state."""
        s = zeros(self.conv.kernel, batch_size, self.n_heads, self.d_key, self.d_value)
        return GatedDeltaNetState(self.conv.init_state(batch_size), s)

    @override
    def step(self, x: Tensor, state: GatedDeltaNetState) -> tuple[Tensor, GatedDeltaNetState]:
        return SequenceLayer.step(self, x, state) if self.n_products > 1 else super().step(x, state)

    @override
    def step_(self, x: Tensor, state: GatedDeltaNetState) -> Tensor:
        if self.n_products > 1:
            return SequenceLayer.step_(self, x, state)
        return super().step_(x, state)

    def scan(self, *inputs: Any, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """With several products, each is a step: the first decays the state, the last is read."""
        if self.n_products == 1:
            return super().scan(*inputs, starts=starts)
        (q, k, v, log_decay, beta), s = inputs
        others, n = self.n_products - 1, self.n_products
        q = F.pad(q[:, :, None], (0, 0, 0, 0, others, 0)).flatten(1, 2)
        log_decay = F.pad(log_decay[:, :, None], (0, 0, 0, others)).flatten(1, 2)
        k, v = (t.unflatten(2, (n, -1)).flatten(1, 2) for t in (k, v))
        beta = beta.unflatten(2, (n, -1)).flatten(1, 2)
        if starts is not None:
            starts = F.pad(starts[:, :, None], (0, others)).flatten(1)
        y, s = gated_delta_rule(GatedDeltaSignals(q, k, v, log_decay, beta), s, starts=starts)
        return y[:, others::n], s

    def mixing(self, x: Tensor) -> Tensor:
        """What the recurrence makes of the convolved values, of one product."""
        if self.n_products > 1:
            raise InputError(
                f"the values of a token have one weight for n_products=1 alone, got "
                f"n_products={self.n_products}: leave out match=mixing"
            )
        return super().mixing(x)

    def flops_per_token(self, length: int) -> float:
        """Projections, convolution, products with the state, and the system of a chunk."""
        keys = self.n_heads * self.d_key
        inside = min(self.n_products * length, CHUNK) * (4.0 * keys + 3.0 * self.d_values)
        between = 6.0 * self.d_key * self.d_values
        return super().flops_per_token(length) + self.n_products * (inside + between)

    @prepared
    def rate(self) -> Float[Tensor, " head"]:
        """Decay rate of each head per unit of step."""
        return self.a_log.exp()

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """The input of the convolution, decays, beta (..., head), and input of the gate."""
        mixed, z, step, beta = self.in_proj(x).split(self.splits, dim=-1)
        beta = 2 * beta.sigmoid() if self.reflects else beta.sigmoid()
        if not self.gated:
            return mixed, torch.zeros_like(beta[..., : self.n_heads]), beta, z
        return mixed, -self.rate() * F.softplus(step + self.dt_bias), beta, z

    def signals(
        self, mixed: Tensor, log_decay: Tensor, beta: Tensor, z: Tensor
    ) -> tuple[Sequence[Any], tuple[Tensor, ...]]:
        """Queries (scaled) and keys of unit length (..., head, d_key), values, decays and beta.

        With several products, the heads of one product follow the heads of the product before it.
        """
        n = self.n_products
        q, k, v = mixed.split([self.d_keys, n * self.d_keys, n * self.d_values], dim=-1)
        q, k = (unit_length(t.unflatten(-1, (-1, self.d_key))) for t in (q, k))
        if (shared := self.n_heads // self.n_key_heads) > 1:
            q, k = (t.repeat_interleave(shared, dim=-2) for t in (q, k))
        v = v.unflatten(-1, (n * self.n_heads, -1))
        return [GatedDeltaSignals(self.query_scale * q, k, v, log_decay, beta)], (z,)

    def read(self, y: Tensor, z: Tensor) -> Tensor:
        """Normalise each head, and gate."""
        normed = self.norm(y.to(self.norm.weight.dtype)).flatten(-2)
        return self.out_proj(normed * F.silu(z) if self.gated else normed)
