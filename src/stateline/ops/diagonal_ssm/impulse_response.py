"""Impulse response of a diagonal state space model, in kernels compiled by numba for the CPU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stateline.ops.diagonal_ssm.response_kernel import backward, forward
from stateline.ops.diagonal_ssm.transition_kernel import transition
from stateline.ops.kernel_op import define_kernel_op, empty_like, like
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import array, fan_out


def impulse_response(log_a: Tensor, b: Tensor, c: Tensor, length: int) -> Tensor:
    """Outputs (channel, length) for a first input of one and no other, one readout per channel."""
    return _response(log_a, b, c, b.new_empty(length))


def _prepare(log_a: Tensor, b: Tensor, c: Tensor) -> tuple[Any, ...]:
    """The transition in float64, the vectors, and the work per token."""
    dtype = launch.working_dtype(log_a, b, c)
    a = np.empty(log_a.numel())
    transition(array(log_a, dtype).reshape(-1), a)
    return a.reshape(2, *log_a.shape[:2]), array(b, dtype), array(c, dtype), b.numel() / 2


def _forward(log_a: Tensor, b: Tensor, c: Tensor, times: Tensor) -> Tensor:
    *constants, work = _prepare(log_a, b, c)
    y = torch.empty((len(b), len(times)), dtype=launch.working_dtype(log_a, b, c))
    fan_out(forward, (*constants, y.numpy()), len(b), work * len(times))
    return y


def _backward(
    grad: Tensor, log_a: Tensor, b: Tensor, c: Tensor, times: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *constants, work = _prepare(log_a, b, c)
    dlog_a, db, dc = (np.empty(b.shape) for _ in range(3))
    signal = array(grad, launch.working_dtype(log_a, b, c))
    fan_out(backward, (signal, *constants, dlog_a, db, dc), len(b), 2 * work * len(times))
    dlog_a = dlog_a.reshape(-1, *log_a.shape).sum(axis=0)
    return (*like((dlog_a, db, dc), (log_a, b, c)), torch.zeros_like(times))


_response = define_kernel_op(
    "impulse_response_kernel",
    _forward,
    _backward,
    lambda log_a, b, c, times: b.new_empty(
        len(b), len(times), dtype=launch.working_dtype(log_a, b, c)
    ),
    lambda _grad, *inputs: empty_like(*inputs),
)
