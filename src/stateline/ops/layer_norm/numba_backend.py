"""Layer normalisation for training, in kernels compiled by numba for the CPU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stateline.ops.backend import wants_gradient
from stateline.ops.numba_kernels import tensors
from stateline.ops.numba_kernels.norms import backward, forward
from stateline.ops.numba_kernels.parameters import ROW_PIECES
from stateline.ops.numba_kernels.tensors import array, like
from stateline.ops.numba_kernels.threads import fan_out

WIDEST = 256
"""Entries up to which the kernel is faster than PyTorch's."""


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernels cannot run this call, or an empty string."""
    x, weight, bias, _ = inputs
    if torch.compiler.is_compiling() or not all(map(tensors.is_plain, inputs[:3])):
        return "compiled functions and sharded weights take PyTorch's operator"
    if not wants_gradient(x, weight, bias):
        return "without a gradient, PyTorch's function is as fast"
    if not 0 < x.shape[-1] <= WIDEST:
        return "PyTorch's function is as fast for wide vectors"
    if x.dtype not in (torch.float32, torch.float64) or weight.dtype != x.dtype != bias.dtype:
        return "the numba kernel takes one precision, float32 or float64"
    if x.is_cpu and torch.is_autocast_enabled("cpu"):
        return "autocast chooses another precision"
    return tensors.can_use(x, weight, bias)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Apply the kernels and record the gradient."""
    y: Tensor = _Recorded.apply(x, weight, bias, eps)
    return y


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype)
        rows, *vectors, out = (array(t, x.dtype) for t in (x, weight, bias, y))
        rows, out = rows.reshape(-1, x.shape[-1]), out.reshape(-1, x.shape[-1])
        moments = np.empty((2, len(rows)), rows.dtype)
        fan_out(forward, (rows, *vectors, out, moments, eps), len(rows), 0.5 * x.numel())
        ctx.save_for_backward(x, weight)
        ctx.moments = moments
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        g, rows = (array(t, x.dtype).reshape(-1, x.shape[-1]) for t in (grad, x))
        found, sums = np.empty_like(rows), np.zeros((ROW_PIECES, 2, x.shape[-1]))
        arrays = g, rows, array(weight, x.dtype), ctx.moments, found, sums
        fan_out(backward, arrays, ROW_PIECES, x.numel())
        return (*like((found, *sums.sum(axis=0)), (x, weight, weight)), None)
