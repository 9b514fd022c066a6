"""Mamba: a state space model that chooses by its input what to remember."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import accumulates, zeros
from stateline.layers.decoder import prepared
from stateline.layers.linear import Linear
from stateline.layers.mixers.convolved import ConvolvedRecurrence
from stateline.layers.mixers.finite_filter import FiniteFilterState
from stateline.layers.mixers.short_conv import ShortConv
from stateline.layers.mixers.step_sizes import initial_step_bias
from stateline.ops import ScanSignals, selective_scan, selective_scan_step, selective_scan_step_
from stateline.settings import Count, Factor, NotNegative


@accumulates("h")
class MambaState(NamedTuple):
    """State of the convolution, and of the state space model of every channel."""

    conv: FiniteFilterState
    h: Float[Tensor, "batch d_inner d_state"]


class Mamba(ConvolvedRecurrence):
    r"""Selective state space layer between a gate and a short convolution.

    .. math::
        (u, z) = W_{\mathrm{in}} x, \quad u \leftarrow \mathrm{silu}(\mathrm{conv}(u)), \quad
        (r, B, C) = W_x u, \quad \Delta = \mathrm{softplus}(W_\Delta r + b_\Delta)

    .. math::
        h_t = e^{\Delta_t A} \odot h_{t-1} + \Delta_t u_t B_t, \qquad
        y = W_{\mathrm{out}} \bigl( (C_t \cdot h_t + D \odot u_t) \odot \mathrm{silu}(z_t) \bigr)

    Step, input vector and output vector depend on the input: a large step writes the token and
    forgets the past, a small one ignores the token. Blocks of this layer have no feed-forward. The
    parameters of the state space models and the state stay float32 under a cast to half precision.

    Args:
        d_model: Width of input and output.
        d_state: Size of the state of each inner channel.
        d_conv: Taps of the convolution.
        expand: Number of inner channels, as a multiple of ``d_model``.
        dt_rank: Rank of the map to the steps; by default ``d_model / 16``, rounded up.
        bias: Whether the first and the last map have biases.
        conv_bias: Whether the convolution has biases.
        norm_eps: If given, r, B and C are each divided by their root mean square, and this is added
            to the mean square, as in Falcon-Mamba.
        learned_norms: Whether each entry of them is then multiplied by a learned weight, as in
            Jamba; needs ``norm_eps``.

    Raises:
        InputError: If a size is not positive, or ``norm_eps`` is missing.

    References:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
        section 3; initial values as in the official code.
    """

    wants_feed_forward = False
    ops = selective_scan, selective_scan_step, selective_scan_step_
    optimizer_groups: ClassVar[Mapping[str, str]] = dict.fromkeys(("a_log", "skip"), "no_decay")

    def __init__(  # noqa: PLR0913
        self,
        d_model: int,
        *,
        d_state: Count = 16,
        d_conv: Count = 4,
        expand: Factor = 2.0,
        dt_rank: Count | None = None,
        bias: bool = False,
        conv_bias: bool = True,
        norm_eps: NotNegative | None = None,
        learned_norms: bool = False,
    ) -> None:
        super().__init__(d_model)
        self.d_conv, self.conv_bias = d_conv, conv_bias
        self.expand, self.bias = expand, bias
        self.norm_eps, self.learned_norms = norm_eps, learned_norms
        if learned_norms and norm_eps is None:
            raise InputError("learned_norms needs norm_eps, got norm_eps=None")
        self.d_inner, self.d_state = int(expand * d_model), d_state
        self.dt_rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        if self.d_inner < 1:
            raise InputError(f"expand * d_model must be at least 1, got {self.d_inner}")
        self.in_proj = Linear(d_model, [self.d_inner] * 2, bias=bias)
        self.conv = ShortConv(self.d_inner, taps=d_conv, bias=conv_bias)
        self.x_proj = Linear(self.d_inner, [self.dt_rank, d_state, d_state], bias=False)
        # not an nn.Linear, which models initialise differently and cast to half precision
        bound = self.dt_rank**-0.5
        self.dt_weight = nn.Parameter(
            torch.empty(self.d_inner, self.dt_rank).uniform_(-bound, bound)
        )
        self.dt_bias = nn.Parameter(initial_step_bias(self.d_inner))
        self.a_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(self.d_inner, 1))
        self.skip = nn.Parameter(torch.ones(self.d_inner))
        normed = self.dt_rank + 2 * d_state
        self.norm_weight = nn.Parameter(torch.ones(normed)) if learned_norms else None
        self.out_proj = Linear(self.d_inner, d_model, bias=bias)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> MambaState:  # noqa: ARG002
        """Zero states."""
        h = zeros(self.a_log, batch_size, self.d_inner, self.d_state)
        return MambaState(self.conv.init_state(batch_size), h)

    def flops_per_token(self, length: int) -> float:
        """Projections, convolution, and about 7 operations per entry of the state."""
        steps = 2.0 * self.dt_weight.numel() + 7.0 * self.a_log.numel()
        return super().flops_per_token(length) + steps

    @prepared
    def transition(self) -> Float[Tensor, "d_inner d_state"]:
        """A, which is negative, so that states decay."""
        return -self.a_log.exp()

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """The input of the convolution, and of the gate."""
        return self.in_proj(x).chunk(2, dim=-1)

    def signals(self, mixed: Tensor, *others: Tensor) -> tuple[Sequence[Any], tuple[Tensor, ...]]:
        """Inputs and steps (..., d_inner), the transition, and vectors (..., 1, d_state)."""
        sizes = [self.dt_rank, self.d_state, self.d_state]
        r, b, c = self.x_proj(mixed).split_with_sizes(sizes, dim=-1)
        if (eps := self.norm_eps) is not None:
            r, b, c = (F.rms_norm(part, part.shape[-1:], eps=eps) for part in (r, b, c))
        if self.norm_weight is not None:
            weights = self.norm_weight.to(r.dtype).split(sizes)
            r, b, c = (part * w for part, w in zip((r, b, c), weights, strict=True))
        dt = F.softplus(F.linear(r.to(self.dt_weight.dtype), self.dt_weight) + self.dt_bias)
        signals = ScanSignals(mixed, dt, b.unsqueeze(-2), c.unsqueeze(-2))
        return (signals, self.transition()), (mixed, *others)

    def read(self, y: Tensor, u: Tensor, z: Tensor) -> Tensor:
        """Add the skip connection, and gate."""
        return self.out_proj(((y + self.skip * u) * F.silu(z)).to(z.dtype))
