"""Weights of state space models in one pass, in kernels compiled by numba for the CPU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stateline.ops.kernel_op import KernelOp
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import array, fan_out
from stateline.ops.ssm_parameters import discretize_kernel, shift_taps_kernel

MOST_TAPS = 512
"""Most taps for which sums of products are faster than the FFT."""


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernels cannot run this call, or an empty string."""
    return launch.can_use(*inputs)


def gains(function: str, *inputs: Any) -> bool:
    """Whether a call is faster here: the FFT is for many taps."""
    return function != "shift_taps" or inputs[0].shape[1] <= MOST_TAPS


def _forward(b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    dtype = launch.working_dtype(b, c, skip)
    y = torch.zeros(b.shape, dtype=dtype, device="cpu")
    arrays = [array(x, dtype) for x in (b, c, skip)]
    work = b.numel() * b.shape[1] * 0.1
    fan_out(shift_taps_kernel.forward, (*arrays, y.numpy()), len(b), work)
    return y.to(b.dtype)


def _backward(grad: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Any:
    dtype = launch.working_dtype(b, c, skip)
    arrays = [array(x, dtype) for x in (grad, b, c)]
    db, dc = (np.zeros_like(x) for x in arrays[1:])
    work = b.numel() * b.shape[1] * 0.2
    fan_out(shift_taps_kernel.backward, (*arrays, db, dc), len(b), work)
    return db, dc, grad[:, 0].clone()  # an operator must not return a view of its input


shift_taps = KernelOp("shift_taps_kernel", _forward, _backward, lambda b, *_: b.new_empty(b.shape))


def _forward_of_rule(
    log_dt: Tensor, decay: Tensor, frequency: Tensor, b: Tensor, rule: str
) -> tuple[Tensor, Tensor]:
    inputs = (log_dt, decay, frequency, b)
    dtype = launch.working_dtype(*inputs)
    found = [torch.empty((len(log_dt), *b.shape[1:]), dtype=dtype, device="cpu") for _ in range(2)]
    arrays = (array(x, dtype) for x in inputs)
    discretize_kernel.forward(*arrays, *(x.numpy() for x in found), rule == "zoh")
    log_a, b_bar = (x.to(log_dt.dtype) for x in found)
    return log_a, b_bar


def _backward_of_rule(grad_a: Tensor, grad_b: Tensor, *inputs: Any) -> Any:
    *tensors, rule = inputs
    dtype = launch.working_dtype(*tensors)
    arrays = [array(x, dtype) for x in (grad_a, grad_b, *tensors)]
    found = [np.zeros_like(x) for x in arrays[2:]]
    discretize_kernel.backward(*arrays, *found, rule == "zoh")
    return found


def _empty(log_dt: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    shape = (len(log_dt), *others[2].shape[1:])
    return log_dt.new_empty(shape), log_dt.new_empty(shape)


discretize = KernelOp("discretize_kernel", _forward_of_rule, _backward_of_rule, _empty)
