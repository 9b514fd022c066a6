"""The definition of a diagonal state space model: its recurrence, in complex numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stateline.ops.convolution import skipped
from stateline.ops.diagonal_ssm import DiagonalWeights
from stateline.ops.planes import Planes
from stateline.ops.stepping import Stepper, copying, one_token, wide


def diagonal_ssm(
    u: Tensor, weights: DiagonalWeights, state: Tensor | None, starts: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Run the recurrence, one input after the other."""
    a, b = as_complex(weights.log_a).exp(), as_complex(weights.b)
    c = as_complex(weights.c).unflatten(0, (-1, u.shape[-1]))  # (readout, channel, mode)
    dtype = torch.promote_types(u.dtype, torch.float32)
    zeros = torch.zeros(*u.shape[:-2], *weights.b.shape, dtype=dtype, device=u.device)
    x, outputs = as_complex(zeros if state is None else state), []
    for t, u_t in enumerate(u.unbind(dim=-2)):
        if starts is not None:
            x = x.masked_fill(starts[..., t, None, None], 0.0)
        x = a * x + b * u_t[..., None]
        outputs.append(2 * (c * x[..., None, :, :]).sum(dim=-1).real.flatten(-2))
    y = torch.stack(outputs, dim=-2) if outputs else u.new_zeros(*u.shape[:-1], len(weights.c))
    return y.to(u.dtype), None if state is None else torch.view_as_real(x)


def diagonal_ssm_every(u: Tensor, weights: DiagonalWeights, stride: int) -> Tensor:
    """Run the recurrence over all inputs, and keep every ``stride``-th output."""
    return diagonal_ssm(u, weights, None)[0][..., stride - 1 :: stride, :]


diagonal_ssm_step = one_token(diagonal_ssm)


def stepper_of(step: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Stepper]:
    """From ``diagonal_ssm_step`` the function that prepares steps with a skip connection."""

    def prepare(weights: DiagonalWeights, skip: Tensor) -> Stepper:
        def skipping(u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            y, after = step(u, weights, state)
            return y + skipped(u, skip), after

        return copying(skipping)

    return prepare


diagonal_ssm_stepper = stepper_of(diagonal_ssm_step)


def as_complex(planes: Planes) -> Tensor:
    """A complex tensor; a copy, because a view of float64 would need an alignment of 16 bytes."""
    return torch.complex(*wide(planes).unbind(dim=-1))
