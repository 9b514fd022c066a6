"""Linear scan, token by token, in kernels compiled by numba for the CPU."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.kernel_op import KernelOp, empty_like
from stateline.ops.linear_scan.numba_kernel import WIDTH, backward, forward
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import fan_out, flat
from stateline.ops.starts import at_starts

FORWARD, BACKWARD = 0.4, 0.8
"""Nanoseconds per position and channel, to decide whether to use threads."""

can_use = launch.can_run


def linear_scan(
    f: Tensor, b: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence."""
    return _scan(at_starts(f, starts, 0.0), b, state)


def _sizes(b: Tensor) -> tuple[int, int, int]:
    """Length and channels, and the number of tasks."""
    rows, length, channels = b.shape
    return length, channels, rows * -(-channels // WIDTH)


def _forward(f: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    *sizes, tasks = _sizes(b)
    dtype = launch.working_dtype(f, b, state)
    y, after = torch.empty(b.shape, dtype=dtype, device="cpu"), state.to(dtype, copy=True)
    after = after.contiguous()
    arrays = (flat(x, dtype) for x in (f, b, after, y))
    fan_out(forward, (*arrays, *sizes), tasks, b.numel() * FORWARD)
    return y.to(b.dtype), after.to(state.dtype)


def _backward(grad: Tensor, grad_after: Tensor, f: Tensor, b: Tensor, state: Tensor) -> Any:
    """The states are computed again, then their gradients from the last token to the first."""
    *sizes, tasks = _sizes(b)
    dtype = launch.working_dtype(f, b, state)
    y, _ = _forward(f.to(dtype), b.to(dtype), state.to(dtype))
    df, db = (torch.empty(b.shape, dtype=dtype, device="cpu") for _ in range(2))
    g = grad_after.to(dtype, copy=True).contiguous()
    arrays = (flat(x, dtype) for x in (grad, f, y, state, g, df, db))
    fan_out(backward, (*arrays, *sizes), tasks, b.numel() * BACKWARD)
    return df, db, g


_scan = KernelOp(
    "linear_scan_kernel", _forward, _backward, lambda _, b, state: empty_like(b, state)
)
