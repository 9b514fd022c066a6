"""The definition of the discretisation, in complex numbers."""

import torch
from torch import Tensor

from stateline.ops.discretization import Discretization


def discretize(
    log_dt: Tensor, decay: Tensor, frequency: Tensor, b: Tensor, rule: Discretization
) -> tuple[Tensor, Tensor]:
    """Evaluate the formulas in double precision."""
    copies = len(log_dt) // len(decay)
    a = torch.complex(-decay.double(), frequency.double()).repeat(copies, 1)
    b_c = torch.complex(b[..., 0].double(), b[..., 1].double()).repeat(copies, 1)
    dt = log_dt.double().exp()[:, None]
    z = dt * a
    if rule == "zoh":
        log_a, gain = z, (z.exp() - 1) / z
    else:
        log_a, gain = ((1 + z / 2) / (1 - z / 2)).log(), 1 / (1 - z / 2)
    log_a, b_bar = (torch.view_as_real(x) for x in (log_a, dt * gain * b_c))
    return log_a.to(log_dt.dtype), b_bar.to(log_dt.dtype)
