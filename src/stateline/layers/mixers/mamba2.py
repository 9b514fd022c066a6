"""Mamba-2: a selective state space model with one decay per head, computed like attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import accumulates, zeros
from stateline.layers.decoder import prepared
from stateline.layers.linear import scaled_linear
from stateline.layers.mixers.convolved import ConvolvedValues
from stateline.layers.mixers.finite_filter import FiniteFilterState
from stateline.layers.mixers.short_conv import ShortConv
from stateline.layers.mixers.step_sizes import initial_step_bias
from stateline.ops import (
    LinearSignals,
    linear_attention,
    linear_attention_step,
    linear_attention_step_,
)
from stateline.ops.linear_attention import CHUNK
from stateline.settings import Choice, Count, Factor, NotNegative, Settings


@accumulates("h")
class Mamba2State(NamedTuple):
    """State of the convolution, and of the state space model of every head."""

    conv: FiniteFilterState
    h: Float[Tensor, "batch head d_state d_head"]


def head_width(inner: int, d_head: int | None, n_groups: int) -> int:
    """Inner channels of a head: by default the largest number up to 64 that divides all.

    Raises:
        InputError: If there are none, it does not divide them, or the groups do not divide the
            heads.

    Example:
        >>> head_width(96, None, n_groups=1)
        48
    """
    if inner < 1:
        raise InputError(f"expand * d_model must be at least 1, got {inner}")
    if d_head is None:
        d_head = max(size for size in range(1, min(inner, 64) + 1) if inner % size == 0)
    if inner % d_head or inner // d_head % n_groups:
        raise InputError(
            "d_head must divide expand * d_model, and n_groups the number of heads, "
            f"got {d_head=}, {n_groups=} and expand * d_model = {inner}"
        )
    return d_head


@dataclass(frozen=True, kw_only=True)
class Multipliers(Choice):
    r"""Constant factors, as in Falcon-H1.

    Attributes:
        z: Factor of z.
        u: Factor of u before the convolution.
        b: Factor of B.
        c: Factor of C.
        step: Factor of :math:`\delta`.
        out: Factor of the output.
    """

    owner = "multipliers"
    z: float = 1.0
    u: float = 1.0
    b: float = 1.0
    c: float = 1.0
    step: float = 1.0
    out: float = 1.0


PLAIN = Multipliers()


@dataclass(frozen=True, kw_only=True)
class Mamba2Settings(Settings):
    r"""Settings of :class:`~stateline.layers.Mamba2`.

    Attributes:
        d_state: Rows of each head's state: the length of B and C.
        d_conv: Taps of the convolution.
        expand: Number of inner channels, as a multiple of ``d_model``.
        d_head: Inner channels of a head; by default the largest number up to 64 that divides them.
        n_groups: Groups of heads that share B, C and the norm; must divide the number of heads.
        bias: Whether the first and the last map have biases.
        conv_bias: Whether the convolution has biases.
        norm_eps: Added to the mean square in the norm.
        min_step: Smaller steps :math:`\Delta` are raised to this, as in Nemotron-H.
        normalise: Whether there is a norm before the last map.
        multipliers: Constant factors of what the maps give: see :class:`Multipliers`.
    """

    d_state: Count = 128
    d_conv: Count = 4
    expand: Factor = 2.0
    d_head: Count | None = None
    n_groups: Count = 1
    bias: bool = False
    conv_bias: bool = True
    norm_eps: NotNegative = 1e-5
    min_step: NotNegative = 0.0
    normalise: bool = True
    multipliers: Multipliers = PLAIN


class Mamba2(ConvolvedValues):
    r"""Selective state space layer in the form dual to attention (SSD).

    .. math::
        (z, u, B, C, \delta) = W_{\mathrm{in}} x, \quad
        (u, B, C) \leftarrow \mathrm{silu}(\mathrm{conv}(u, B, C)), \quad
        \Delta = \mathrm{softplus}(\delta + b_\Delta)

    .. math::
        S_t = e^{\Delta_t a} S_{t-1} + \Delta_t B_t u_t^\top, \qquad
        y = W_{\mathrm{out}}\, \mathrm{norm}\bigl( (S_t^\top C_t + D u_t) \odot
        \mathrm{silu}(z_t) \bigr)

    in each head. Unlike in Mamba, each head has a single decay, and the heads of a group share B
    and C. So chunks are computed by matrix products, and the state can be larger. The norm divides
    by the root mean square over the inner channels of a group. Blocks of this layer have no
    feed-forward. The parameters of the state space models and the state stay float32 under a cast
    to half precision.

    Args:
        d_model: Width of input and output.
        **settings: See :class:`~stateline.layers.mixers.mamba2.Mamba2Settings`.

    Raises:
        InputError: If a size is not positive, or one does not divide the other.

    References:
        Dao and Gu, "Transformers are SSMs", ICML 2024, sections 6 and 7; initial values as in the
        official code.
    """

    settings: Mamba2Settings
    wants_feed_forward = False
    ops = linear_attention, linear_attention_step, linear_attention_step_
    optimizer_groups: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("a_log", "dt_bias", "skip"), "no_decay"
    )

    def __init__(self, d_model: int, **settings: Any) -> None:
        super().__init__(d_model, **settings)
        its, self.d_inner = self.settings, int(self.settings.expand * d_model)
        self.d_state, self.n_groups, self.min_step = its.d_state, its.n_groups, its.min_step
        self.d_head = head_width(self.d_inner, its.d_head, its.n_groups)
        self.n_heads, shared = self.d_inner // self.d_head, its.n_groups * its.d_state
        factors = its.multipliers
        self.in_proj = scaled_linear(
            d_model,
            (self.d_inner, factors.z),
            (self.d_inner, factors.u),
            (shared, factors.b),
            (shared, factors.c),
            (self.n_heads, factors.step),
            bias=its.bias,
        )
        self.conv = ShortConv(self.d_inner + 2 * shared, taps=its.d_conv, bias=its.conv_bias)
        self.dt_bias = nn.Parameter(initial_step_bias(self.n_heads))
        self.a_log = nn.Parameter(torch.empty(self.n_heads).uniform_(1, 16).log())
        self.skip = nn.Parameter(torch.ones(self.n_heads))
        self.norm_weight = nn.Parameter(torch.ones(self.d_inner)) if its.normalise else None
        self.norm_eps = its.norm_eps
        self.out_proj = scaled_linear(self.d_inner, (d_model, factors.out), bias=its.bias)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Mamba2State:  # noqa: ARG002
        """Zero states."""
        h = zeros(self.a_log, batch_size, self.n_heads, self.d_state, self.d_head)
        return Mamba2State(self.conv.init_state(batch_size), h)

    def flops_per_token(self, length: int) -> float:
        """Projections, convolution, products with the state, and attention inside a chunk."""
        inside = 2.0 * min(length, CHUNK) * (self.n_groups * self.d_state + self.d_inner)
        between = 4.0 * self.d_state * self.d_inner
        return super().flops_per_token(length) + inside + between

    @prepared
    def transition(self) -> Float[Tensor, " head"]:
        """The decay rate a of each head, which is negative."""
        return -self.a_log.exp()

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """The input of the convolution, steps (..., head), and input of the gate."""
        sizes = [self.d_inner, self.conv.d_model, self.n_heads]
        z, mixed, dt = self.in_proj(x).split(sizes, dim=-1)
        dt = F.softplus(dt + self.dt_bias)
        return mixed, dt.clamp(min=self.min_step) if self.min_step else dt, z

    def signals(
        self, mixed: Tensor, dt: Tensor, z: Tensor
    ) -> tuple[Sequence[LinearSignals], tuple[Tensor, ...]]:
        """Vectors (..., group, d_state), inputs (..., head, d_head) and decays of the heads."""
        shared = self.n_groups * self.d_state
        u, b, c = mixed.split([self.d_inner, shared, shared], dim=-1)
        b, c = (t.unflatten(-1, (self.n_groups, self.d_state)) for t in (b, c))
        u = u.unflatten(-1, (self.n_heads, self.d_head))
        return [LinearSignals(c, b, dt[..., None] * u, dt * self.transition())], (u, z)

    def mixing(self, x: Tensor) -> Tensor:
        """The weights of u: steps and the skip connection are a part of them."""
        steps, skip = self.project(x)[1].mT[..., None, :], self.skip[:, None]
        return super().mixing(x) * steps + torch.diag_embed(skip.expand(-1, x.shape[1]))

    def read(self, y: Tensor, u: Tensor, z: Tensor) -> Tensor:
        """Add the skip connection, gate, and normalise."""
        gated = (y + self.skip[:, None] * u).flatten(-2) * F.silu(z)
        if self.norm_weight is None:
            return self.out_proj(gated.to(z.dtype))
        groups = gated.unflatten(-1, (self.n_groups, -1))
        normed = F.rms_norm(groups, groups.shape[-1:], eps=self.norm_eps).flatten(-2)
        return self.out_proj((normed * self.norm_weight).to(z.dtype))
