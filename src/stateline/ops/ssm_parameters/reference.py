"""The definitions, in complex numbers."""

import torch
from torch import Tensor

from stateline.ops.diagonal_ssm.reference import as_complex
from stateline.ops.discretization import Discretization


def shift_taps(b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """Sum the products tap by tap."""
    size = b.shape[1]
    taps = [(b[:, : size - lag] * c[:, lag:]).sum(dim=1) for lag in range(size)]
    return torch.stack([taps[0] + skip, *taps[1:]], dim=1)


def discretize(
    log_dt: Tensor, decay: Tensor, frequency: Tensor, b: Tensor, rule: Discretization
) -> tuple[Tensor, Tensor]:
    """Evaluate the formulas in double precision; at z = 0, the gain is its limit."""
    copies = len(log_dt) // len(decay)
    a = torch.complex(-decay.double(), frequency.double()).repeat(copies, 1)
    b_c = as_complex(b.double()).repeat(copies, 1)
    dt = log_dt.double().exp()[:, None]
    z = dt * a
    if rule == "zoh":
        nonzero = torch.where(z == 0, torch.ones_like(z), z)
        log_a, gain = z, torch.where(z == 0, 1 + z / 2, (nonzero.exp() - 1) / nonzero)
    else:
        log_a, gain = ((1 + z / 2) / (1 - z / 2)).log(), 1 / (1 - z / 2)
    log_a, b_bar = (torch.view_as_real(x) for x in (log_a, dt * gain * b_c))
    return log_a.to(log_dt.dtype), b_bar.to(log_dt.dtype)
