"""Weights of state space models in one pass, in kernels compiled by numba for the CPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stateline.ops.discretization import Discretization
from stateline.ops.kernel_op import define_kernel_op, empty_like, like
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import array, fan_out
from stateline.ops.ssm_parameters import discretize_kernel, shift_taps_kernel

MOST_TAPS = 512
"""Most taps for which sums of products are faster than the FFT."""


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    if function == "shift_taps" and inputs[0].shape[1] > MOST_TAPS:
        return "the FFT is faster for this many taps"
    return launch.can_use(*inputs)


def shift_taps(b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """Sum the products tap by tap."""
    return _taps(b, c, skip)


def discretize(
    log_dt: Tensor, decay: Tensor, frequency: Tensor, b: Tensor, rule: Discretization
) -> tuple[Tensor, Tensor]:
    """Apply the kernel of the rule."""
    log_a, b_bar = _RULES[rule](log_dt, decay, frequency, b)
    return log_a, b_bar


def _forward(b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    dtype = launch.working_dtype(b, c, skip)
    y = torch.zeros(b.shape, dtype=dtype)
    arrays = [array(x, dtype) for x in (b, c, skip)]
    work = b.numel() * b.shape[1] * 0.1
    fan_out(shift_taps_kernel.forward, (*arrays, y.numpy()), len(b), work)
    return y.to(b.dtype)


def _backward(grad: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = launch.working_dtype(b, c, skip)
    arrays = [array(x, dtype) for x in (grad, b, c)]
    found = [np.zeros_like(x) for x in arrays[1:]]
    work = b.numel() * b.shape[1] * 0.2
    fan_out(shift_taps_kernel.backward, (*arrays, *found), len(b), work)
    first = grad[:, 0].clone()  # an operator must not return a view of its input
    db, dc, dskip = like((*found, first), (b, c, skip))
    return db, dc, dskip


_taps = define_kernel_op("shift_taps_kernel", _forward, _backward, lambda b, *_: empty_like(b)[0])


def _define(rule: Discretization) -> Callable[..., Any]:
    """The differentiable function of one rule."""
    zoh = rule == "zoh"

    def run(log_dt: Tensor, decay: Tensor, frequency: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        inputs = (log_dt, decay, frequency, b)
        dtype = launch.working_dtype(*inputs)
        found = [torch.empty((len(log_dt), decay.shape[1], 2), dtype=dtype) for _ in range(2)]
        arrays = (array(x, dtype) for x in inputs)
        discretize_kernel.forward(*arrays, *(x.numpy() for x in found), zoh)
        log_a, b_bar = (x.to(log_dt.dtype) for x in found)
        return log_a, b_bar

    def gradients(
        grad_a: Tensor, grad_b: Tensor, log_dt: Tensor, decay: Tensor, frequency: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = (log_dt, decay, frequency, b)
        dtype = launch.working_dtype(*inputs)
        arrays = [array(x, dtype) for x in (grad_a, grad_b, *inputs)]
        found = [np.zeros_like(x) for x in arrays[2:]]
        discretize_kernel.backward(*arrays, *found, zoh)
        log_dt_, decay_, frequency_, b_ = like(found, inputs)
        return log_dt_, decay_, frequency_, b_

    def empty(
        log_dt: Tensor, decay: Tensor, _frequency: Tensor, _b: Tensor
    ) -> tuple[Tensor, Tensor]:
        shape = (len(log_dt), decay.shape[1], 2)
        return log_dt.new_empty(shape), log_dt.new_empty(shape)

    def empty_gradients(_grad_a: Tensor, _grad_b: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return empty_like(*inputs)

    name = f"discretize_{rule}_kernel"
    return define_kernel_op(name, run, gradients, empty, empty_gradients)


_RULES = {"zoh": _define("zoh"), "bilinear": _define("bilinear")}
