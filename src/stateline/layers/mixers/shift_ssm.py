"""Shift state space model: its state is the latest inputs, read by a learned filter."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stateline.layers.decoder import prepared
from stateline.layers.mixers.finite_filter import FiniteFilter
from stateline.ops import shift_taps
from stateline.settings import Count


class ShiftSSM(FiniteFilter):
    r"""A state space model whose transition S shifts its state by one, per channel.

    .. math:: x_t = S x_{t-1} + B u_t, \qquad y_t = C x_t + D u_t

    It equals a causal filter of ``d_state`` taps, :math:`k_l = \sum_n B_n C_{n+l}`, so its state
    holds the latest ``d_state - 1`` inputs.

    Args:
        d_model: Number of channels.
        d_state: Size of each channel's state: number of tokens that the layer sees.

    Raises:
        InputError: If ``d_state`` is not positive.

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 3.1; initial values as in the official
        code (B = e_1, C as a depthwise convolution of that width, D normal).
    """

    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = {"b": "ssm"}

    def __init__(self, d_model: int, *, d_state: Count = 64) -> None:
        super().__init__(d_model)
        self.filter_len = self.d_state = d_state
        self.b = nn.Parameter(torch.eye(1, d_state).repeat(d_model, 1))
        self.c = nn.Parameter(torch.empty(d_model, d_state).uniform_(-1, 1) / math.sqrt(d_state))
        self.skip = nn.Parameter(torch.randn(d_model))

    @prepared
    def taps(self) -> Float[Tensor, "d_model taps"]:
        """The filter: correlation of B with C, plus the skip connection in the first tap."""
        return shift_taps(self.b, self.c, self.skip)
