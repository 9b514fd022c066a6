"""Shift state space model: a state that holds the latest inputs, read by a learned filter."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from stateline.errors import InputError
from stateline.layers.derived import derived
from stateline.layers.finite_filter import FiniteFilter
from stateline.ops import fft_conv


class ShiftSSM(FiniteFilter):
    r"""A state space model whose transition S shifts its state by one, per channel.

    .. math:: x_t = S x_{t-1} + B u_t, \qquad y_t = C x_t + D u_t

    It is a causal filter of ``d_state`` taps, :math:`k_l = \sum_n B_n C_{n+l}`, and its state need
    hold no more than the inputs that the filter can still reach.

    Args:
        d_model: Number of channels.
        d_state: Size of each channel's state: how far back the layer sees.

    Raises:
        InputError: If ``d_state`` is not positive.

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 3.1; initial values as in the official
        code (B = e_1, C as a depthwise convolution of that width, D normal).
    """

    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = {"b": "ssm"}

    def __init__(self, d_model: int, *, d_state: int = 64) -> None:
        super().__init__(d_model)
        if d_state < 1:
            raise InputError(f"d_state must be at least 1, got {d_state=}")
        self.filter_len = d_state
        self.b = nn.Parameter(torch.zeros(d_model, d_state))
        with torch.no_grad():
            self.b[:, 0] = 1
        self.c = nn.Parameter(torch.empty(d_model, d_state).uniform_(-1, 1) / math.sqrt(d_state))
        self.skip = nn.Parameter(torch.randn(d_model))

    @derived
    def taps(self) -> Float[Tensor, "d_model taps"]:
        """The filter: B correlated with C; the skip connection adds to its first tap."""
        d_state = self.c.shape[1]
        kernel = fft_conv(pad(self.c, (0, d_state - 1)).mT, self.b.flip(-1))[d_state - 1 :].mT
        return kernel + pad(self.skip[:, None], (0, d_state - 1))
