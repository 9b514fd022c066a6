"""Rotation in one pass, in kernels compiled by numba for the CPU."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.feed_forward.numba_kernel import turn
from stateline.ops.kernel_op import define_kernel_op, empty_like
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import fan_out, flat, strided


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernels cannot run this call, or an empty string."""
    x, cos, sin = inputs
    if x.dtype not in (torch.float32, torch.float64) or cos.dtype is not x.dtype:
        return "the numba kernel takes float32 or float64 throughout"
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return "the numba kernel gives no gradient to angles"
    return launch.can_use(x, cos, sin)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the kernel."""
    return _rotary(x, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    batch, length, heads, d = x.shape
    y = torch.empty(x.shape, dtype=x.dtype)
    signal, stride = strided(x.flatten(-2), x.dtype)
    arrays = signal, flat(y, x.dtype), flat(cos, x.dtype), flat(sin, x.dtype)
    sizes = length, heads, d, cos.shape[-1], stride, len(cos) > 1, sign
    fan_out(turn, (*arrays, *sizes), batch * length, x.numel() * 1.0)
    return y


def _forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turned(x, cos, sin, 1)


def _backward(
    grad: Tensor,
    x: Tensor,  # noqa: ARG001
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return _turned(grad, cos, sin, -1), torch.zeros_like(cos), torch.zeros_like(sin)


_rotary = define_kernel_op(
    "rotary_kernel",
    _forward,
    _backward,
    lambda x, *_: empty_like(x)[0],
    lambda _grad, *inputs: empty_like(*inputs),
)
