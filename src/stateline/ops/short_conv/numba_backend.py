"""Short causal convolution, tap by tap, in kernels compiled by numba for the CPU."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stateline.ops.kernel_op import KernelOp
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import (
    Changing,
    array,
    borders_of,
    fan_out,
    flat,
    of_token,
    output,
    strided,
)
from stateline.ops.numba_common.vector import LANES
from stateline.ops.short_conv import MOST_TAPS
from stateline.ops.short_conv.numba_kernel import TOGETHER, backward, forward
from stateline.ops.short_conv.step_kernel import filter_advance
from stateline.ops.stepping import Stepper

ROW_PIECES = 8
"""Parts of the batch that are summed apart; fixed, so threads do not change the rounding."""


can_use = launch.can_run


def gains(function: str, *inputs: Any) -> bool:
    """Whether a call is faster here: the FFT is for many taps."""
    return function != "short_conv" or inputs[1].shape[1] <= MOST_TAPS["cpu"]


def short_conv(u: Tensor, kernel: Tensor, starts: Tensor | None = None) -> Tensor:
    """Sum the delayed signals."""
    filters = len(kernel) // u.shape[-1]
    return convolve(u if filters == 1 else u.tile(filters), kernel, starts)


def short_conv_stepper(weights: Tensor) -> Stepper:
    """Filter many single inputs; the past inputs change in place."""
    dtype = launch.working_dtype(weights)
    taps = array(weights, dtype)

    def step(u: Tensor, past: Tensor) -> Tensor:
        y, outputs = output(u.shape, dtype)
        with Changing(dtype, past) as (inputs,):
            arrays = of_token(u, dtype), taps, inputs, outputs
            fan_out(filter_advance, arrays, len(u), past.numel() / 4)
        return y.to(torch.promote_types(u.dtype, past.dtype))

    return step


def _forward(u: Tensor, kernel: Tensor, starts: Tensor | None) -> Tensor:
    kernel = _reaching(u, kernel)
    dtype, (channels, count) = launch.working_dtype(u, kernel), kernel.shape
    signal, stride = strided(u, dtype)
    y, borders = torch.empty(u.shape, dtype=dtype, device="cpu"), borders_of(u.shape[:-1], starts)
    tasks = (len(borders) - 1) * -(-channels // LANES)
    arrays = signal, _pack_taps(kernel, dtype), flat(y, dtype)
    work = u.numel() * (count / 16 + 1)
    fan_out(forward, (*arrays, count, borders, channels, stride), tasks, work)
    return y.to(u.dtype)


def _backward(grad: Tensor, u: Tensor, kernel: Tensor, starts: Tensor | None) -> Any:
    taps, kernel = kernel.shape[1], _reaching(u, kernel)
    dtype, (channels, count) = launch.working_dtype(u, kernel), kernel.shape
    signal, stride = strided(u, dtype)
    borders, blocks = borders_of(u.shape[:-1], starts), -(-channels // LANES)
    rows = len(borders) - 1
    pieces, whole = max(1, min(rows, ROW_PIECES)), -(-count // TOGETHER) * TOGETHER
    du = np.empty(u.numel(), signal.dtype)
    dtaps = np.empty(pieces * blocks * whole * LANES)  # float64, for they are sums
    arrays = flat(grad, dtype), signal, _pack_taps(kernel, dtype), du, dtaps
    sizes = count, rows, borders, channels, stride, pieces
    fan_out(backward, (*arrays, *sizes), pieces * blocks, u.numel() * (count / 8 + 1))
    dkernel = _unpack_taps(dtaps, pieces, kernel)
    return du, np.pad(dkernel, ((0, 0), (0, taps - count)))


convolve = KernelOp("short_conv_kernel", _forward, _backward, lambda u, *_: u.new_empty(u.shape))
"""Convolution with one filter per channel."""


def _reaching(u: Tensor, kernel: Tensor) -> Tensor:
    """The taps that reach an input of the signal: earlier inputs are zero."""
    return kernel[:, : max(1, u.shape[-2])]


def _pack_taps(kernel: Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """Taps (tap, channel) with the channels padded to a multiple of the lanes; flat."""
    return flat(F.pad(kernel.detach().mT, (0, -len(kernel) % LANES)), dtype)


def _unpack_taps(gradients: NDArray[Any], pieces: int, kernel: Tensor) -> NDArray[Any]:
    """Gradient (channel, tap): the sum of the tasks' gradients, which are padded and reversed."""
    channels, count = kernel.shape
    blocks = -(-channels // LANES)
    whole = gradients.reshape(pieces, blocks, -1, LANES).sum(0)[:, : -count - 1 : -1]
    return whole.transpose(0, 2, 1).reshape(-1, count)[:channels].copy()
