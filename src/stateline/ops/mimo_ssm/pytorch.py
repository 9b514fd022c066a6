"""Diagonal state space model of many inputs by a scan of all modes, on any device."""

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.ops.scan import diagonal_scan


def mimo_ssm_chunk(
    u: Float[Tensor, "*batch length channel"],
    log_a: Float[Tensor, "mode 2"],
    b: Float[Tensor, "mode channel 2"],
    c: Float[Tensor, "output mode 2"],
    state: Float[Tensor, "*batch mode 2"],
) -> tuple[Float[Tensor, "*batch length output"], Float[Tensor, "*batch mode 2"]]:
    """Scan the driven modes, and read them all."""
    driven = (u.to(state.dtype) @ b.transpose(0, 1).flatten(1)).unflatten(-1, (-1, 2))
    x = diagonal_scan(driven, log_a, state)
    read = torch.stack([c[..., 0], -c[..., 1]], dim=-1).flatten(1)  # (output, 2 mode)
    y = 2 * (x.flatten(-2) @ read.T)
    return y.to(u.dtype), x[..., -1, :, :].clone() if u.shape[-2] else state
