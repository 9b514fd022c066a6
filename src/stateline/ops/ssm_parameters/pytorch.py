"""Weights of state space models in real planes, on any device."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from stateline.ops.discretization import DISCRETIZATIONS, Discretization
from stateline.ops.planes import multiply
from stateline.ops.short_conv import short_conv


def shift_taps(b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """Convolve the reversed output vector with the input vector: the last tap comes first."""
    taps = short_conv(c.flip(-1).mT, b).mT.flip(-1)
    return taps + pad(skip[:, None], (0, taps.shape[1] - 1))


def discretize(
    log_dt: Tensor, decay: Tensor, frequency: Tensor, b: Tensor, rule: Discretization
) -> tuple[Tensor, Tensor]:
    """Repeat the rows for all channels, and apply the rule."""
    dt, copies = log_dt.exp()[:, None, None], len(log_dt) // len(decay)
    a = torch.stack([-decay, frequency], dim=-1).repeat(copies, 1, 1)
    log_a, gain = DISCRETIZATIONS[rule](dt * a)
    return log_a, dt * multiply(gain, b.repeat(copies, 1, 1))
