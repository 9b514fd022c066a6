"""Diagonal state space model with many inputs by a scan of all modes, on any device."""

import torch
from torch import Tensor

from stateline.ops.mimo_ssm import MIMOWeights
from stateline.ops.planes import exponential, multiply, real_rows
from stateline.ops.scan import diagonal_scan


def mimo_ssm(u: Tensor, weights: MIMOWeights, state: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply by B, scan the modes, multiply by C."""
    log_a, b, c = weights
    driven = (u.to(state.dtype) @ b.transpose(0, 1).flatten(1)).unflatten(-1, (-1, 2))
    x = diagonal_scan(driven, log_a, state)
    y = x.flatten(-2) @ real_rows(c).T
    return y.to(u.dtype), x[..., -1, :, :].clone() if u.shape[-2] else state


def mimo_ssm_step(u: Tensor, weights: MIMOWeights, state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the recurrence once, in real planes."""
    log_a, b, c = weights
    driven = torch.einsum("...h,phz->...pz", u.to(state.dtype), b)
    state = multiply(exponential(log_a), state) + driven
    y = 2 * multiply(c, state[..., None, :, :])[..., 0].sum(dim=-1)
    return y.to(u.dtype), state
