"""Weights of state space models in real planes, on any device."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from stateline.ops.discretization import DISCRETIZATIONS, Discretization
from stateline.ops.fft_conv import fft_conv
from stateline.ops.planes import multiply


def shift_taps(b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """Convolve with the reversed input vector, by FFT."""
    later = c.shape[1] - 1
    return fft_conv(pad(c, (0, later)).mT, b.flip(-1))[later:].mT + pad(skip[:, None], (0, later))


def discretize(
    log_dt: Tensor, decay: Tensor, frequency: Tensor, b: Tensor, rule: Discretization
) -> tuple[Tensor, Tensor]:
    """Repeat the rows for all channels, and apply the rule."""
    dt, copies = log_dt.exp()[:, None, None], len(log_dt) // len(decay)
    a = torch.stack([-decay, frequency], dim=-1).repeat(copies, 1, 1)
    log_a, gain = DISCRETIZATIONS[rule](dt * a)
    return log_a, dt * multiply(gain, b.repeat(copies, 1, 1))
