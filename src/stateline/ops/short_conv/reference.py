"""The definition of a causal convolution, the same as in ``fft_conv``."""

from itertools import pairwise

import torch
from torch import Tensor

from stateline.ops.fft_conv.reference import fft_conv
from stateline.ops.stepping import Stepper, copying

__all__ = ["short_conv", "short_conv_step", "short_conv_stepper"]


def short_conv(u: Tensor, kernel: Tensor, starts: Tensor | None = None) -> Tensor:
    """Convolve; documents one by one."""
    if starts is None or not u.numel():
        return fft_conv(u, kernel)
    rows = []
    for row, begins in zip(u[None].flatten(0, -3), starts[None].flatten(0, -2), strict=True):
        places = [0, *(begins[1:].nonzero().flatten() + 1).tolist(), len(row)]
        parts = [fft_conv(row[a:b], kernel) for a, b in pairwise(places)]
        rows.append(torch.cat(parts))
    return torch.stack(rows).view(*u.shape[:-1], len(kernel))


def short_conv_step(u: Tensor, weights: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve the past and the input, and keep the last output."""
    reach = torch.cat([past, u[:, None].to(past.dtype)], dim=1).to(
        torch.promote_types(past.dtype, weights.dtype)
    )
    y = short_conv(reach, weights.mT.flip(-1).flatten(0, 1))[:, -1]
    return y, reach[:, 1:].to(past.dtype)


def short_conv_stepper(weights: Tensor) -> Stepper:
    """Apply the step of one filter."""
    return copying(lambda u, past: short_conv_step(u, weights[None], past))
