"""GELU in one pass, in kernels compiled by numba for the CPU."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.dispatch import wants_gradient
from stateline.ops.feed_forward.numba_kernel import gelu_backward, gelu_forward
from stateline.ops.kernel_op import define_kernel_op, empty_like
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import fan_out, flat

LEAST, LEAST_RECORDED = 4096, 16384
"""Entries from which a call is faster than PyTorch's, without and with a gradient."""

TASK = 4096
"""Entries of a task: as many as the fastest cache holds."""


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernels cannot run this call, or an empty string."""
    x = inputs[0]
    if x.dtype not in (torch.float32, torch.float64):
        return "PyTorch's function is as fast in half precision"
    if x.numel() < (LEAST_RECORDED if wants_gradient(x) else LEAST):
        return "PyTorch's function is faster for few entries"
    return launch.can_use(x)


def gelu(x: Tensor) -> Tensor:
    """Apply the kernel."""
    return _gelu(x)


def _forward(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    arrays = flat(x, x.dtype), flat(y, x.dtype)
    fan_out(gelu_forward, (*arrays, TASK), -(-x.numel() // TASK), 0.7 * x.numel())
    return y


def _backward(grad: Tensor, x: Tensor) -> tuple[Tensor]:
    found = torch.empty(x.shape, dtype=x.dtype)
    arrays = flat(grad, x.dtype), flat(x, x.dtype), flat(found, x.dtype)
    fan_out(gelu_backward, (*arrays, TASK), -(-x.numel() // TASK), x.numel())
    return (found,)


_gelu = define_kernel_op(
    "gelu_kernel",
    _forward,
    _backward,
    lambda x: x.new_empty(x.shape),
    lambda _grad, x: empty_like(x),
)
