"""GSS: a gated state space layer whose state space model has a fraction of the width."""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import AnyLayer
from stateline.layers.compose import Around
from stateline.layers.decoder import prepared
from stateline.layers.linear import Linear
from stateline.layers.mixers.diagonal_ssm import DiagonalRecurrence
from stateline.ops import DiagonalWeights
from stateline.ops.discretization import zero_order_hold
from stateline.settings import Count


class SimplifiedDSS(DiagonalRecurrence):
    r"""The state space model of GSS: one diagonal transition for all channels, and no step size.

    .. math::
        y = k * x + D x, \qquad
        k_l = \mathrm{Re} \sum_n C_n \frac{e^{\Lambda_n} - 1}{\Lambda_n}\, e^{\Lambda_n l},
        \qquad \Lambda = -e^a + i e^b

    All modes are stored: none stands for a conjugate pair.

    Args:
        d_model: Number of channels.
        d_state: Number of complex modes.
        exp_frequency: Whether the imaginary part of Lambda is :math:`e^b` rather than b.

    Raises:
        InputError: If ``d_state`` is not positive.
    """

    optimizer_groups: ClassVar[Mapping[str, str]] = {"log_decay": "ssm", "frequency": "ssm"}

    def __init__(self, d_model: int, *, d_state: Count = 512, exp_frequency: bool = True) -> None:
        super().__init__(d_model)
        self.d_state, self.exp_frequency = d_state, exp_frequency
        self.log_decay = nn.Parameter(torch.randn(d_state))
        self.frequency = nn.Parameter(torch.randn(d_state))
        self.c = nn.Parameter(torch.randn(d_model, d_state, 2))
        self.skip = nn.Parameter(torch.randn(d_model))

    @prepared
    def weights(self) -> DiagonalWeights:
        """Logarithm of the transition, input vector and output vector of the recurrence."""
        frequency = self.frequency.exp() if self.exp_frequency else self.frequency
        log_a = torch.stack([-self.log_decay.exp(), frequency], dim=-1)
        _, b = zero_order_hold(log_a)
        # Halved, because the op counts each mode twice, for its conjugate.
        return DiagonalWeights(log_a[None], b.expand_as(self.c), self.c / 2)


class GSS(Around):
    r"""Gated state space layer.

    .. math::
        y = W_o \left( W_g\, \mathrm{DSS}(\mathrm{norm}(\mathrm{gelu}(W_v x)))
        \odot \mathrm{gelu}(W_u x) \right) + b_o

    The state space model works at a quarter of the width, where convolutions are cheap. The gate,
    at four times the width, replaces the feed-forward. In a pre-norm residual block, it is the
    block of the paper. The state has a constant size.

    Args:
        d_model: Width of input and output.
        d_ssm: Width of the state space model, at least 2, for the norm makes a single number zero;
            by default a quarter of ``d_model``.
        expand: Width of the gate, as a multiple of ``d_model``.
        d_state: Number of complex modes of each channel; all share one transition.
        exp_frequency: Whether the frequencies are exponentials of their parameters, as in the
            paper. Otherwise they are the parameters themselves, as in other diagonal models.

    Raises:
        InputError: If a width is too small.

    References:
        Mehta et al., "Long Range Language Modeling via Gated State Spaces", ICLR 2023.
    """

    wants_feed_forward = False

    def __init__(
        self,
        d_model: int,
        *,
        d_ssm: int | None = None,
        expand: Count = 4,
        d_state: Count = 512,
        exp_frequency: bool = True,
    ) -> None:
        super().__init__(d_model)
        d_ssm = max(2, d_model // 4) if d_ssm is None else d_ssm
        if d_ssm < 2:
            raise InputError(f"d_ssm must be at least 2, got {d_ssm=}")
        self.d_ssm, self.expand = d_ssm, expand
        self.d_state, self.exp_frequency = d_state, exp_frequency
        d_gate = expand * d_model
        self.gate = Linear(d_model, d_gate, bias=False)
        self.narrow = Linear(d_model, d_ssm, bias=False)
        self.norm = nn.LayerNorm(d_ssm)
        self.ssm = SimplifiedDSS(d_ssm, d_state=d_state, exp_frequency=exp_frequency)
        self.widen = Linear(d_ssm, d_gate, bias=False)
        self.out_proj = Linear(d_gate, d_model)

    @property
    def inner(self) -> AnyLayer:
        """The state space model."""
        return self.ssm

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The narrow input of the state space model, and the input."""
        return self.norm(F.gelu(self.narrow(x))), x

    def leave(self, kept: Tensor, y: Tensor) -> Tensor:
        """Widen the output of the state space model, and gate it by the input."""
        return self.out_proj(self.widen(y) * F.gelu(self.gate(kept)))
