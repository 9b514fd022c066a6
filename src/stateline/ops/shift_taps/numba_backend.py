"""The correlation by its definition, in kernels compiled by numba for the CPU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stateline.ops.kernel_op import define_kernel_op, empty_like, like
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import array, fan_out
from stateline.ops.shift_taps.numba_kernel import backward, forward

MOST_TAPS = 512
"""Most taps for which sums of products are faster than the FFT."""


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernels cannot run this call, or an empty string."""
    if inputs[0].shape[1] > MOST_TAPS:
        return "by FFT, so many taps are faster"
    return launch.can_use(*inputs)


def shift_taps(b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """Apply the kernel."""
    return _taps(b, c, skip)


def _forward(b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    dtype = launch.working_dtype(b, c, skip)
    y = torch.zeros(b.shape, dtype=dtype)
    arrays = [array(x, dtype) for x in (b, c, skip)]
    fan_out(forward, (*arrays, y.numpy()), len(b), b.numel() * b.shape[1] * 0.1)
    return y.to(b.dtype)


def _backward(grad: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = launch.working_dtype(b, c, skip)
    arrays = [array(x, dtype) for x in (grad, b, c)]
    found = [np.zeros_like(x) for x in arrays[1:]]
    fan_out(backward, (*arrays, *found), len(b), b.numel() * b.shape[1] * 0.2)
    first = grad[:, 0].clone()  # an operator must not return a view of its input
    db, dc, dskip = like((*found, first), (b, c, skip))
    return db, dc, dskip


_taps = define_kernel_op(
    "shift_taps_kernel",
    _forward,
    _backward,
    lambda b, *_: empty_like(b)[0],
    lambda _grad, *inputs: empty_like(*inputs),
)
