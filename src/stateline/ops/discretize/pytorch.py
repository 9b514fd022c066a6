"""Discretisation in real planes, on any device."""

import torch
from torch import Tensor

from stateline.ops.discretization import DISCRETIZATIONS, Discretization
from stateline.ops.planes import multiply


def discretize(
    log_dt: Tensor, decay: Tensor, frequency: Tensor, b: Tensor, rule: Discretization
) -> tuple[Tensor, Tensor]:
    """Repeat the rows for all channels, and apply the rule."""
    dt, copies = log_dt.exp()[:, None, None], len(log_dt) // len(decay)
    a = torch.stack([-decay, frequency], dim=-1).repeat(copies, 1, 1)
    log_a, gain = DISCRETIZATIONS[rule](dt * a)
    return log_a, dt * multiply(gain, b.repeat(copies, 1, 1))
