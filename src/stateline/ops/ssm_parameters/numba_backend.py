"""Discretisation in one pass, in kernels compiled by numba for the CPU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stateline.ops.kernel_op import KernelOp
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import array
from stateline.ops.ssm_parameters import discretize_kernel

can_use = launch.can_run


def _forward(
    log_dt: Tensor, decay: Tensor, frequency: Tensor, b: Tensor, rule: str
) -> tuple[Tensor, Tensor]:
    inputs = (log_dt, decay, frequency, b)
    dtype = launch.working_dtype(*inputs)
    log_a = torch.empty((log_dt.shape[0], *b.shape[1:]), dtype=dtype, device="cpu")
    b_bar = torch.empty_like(log_a)
    arrays = [array(x, dtype) for x in inputs]
    discretize_kernel.forward(*arrays, log_a.numpy(), b_bar.numpy(), rule == "zoh")
    return log_a.to(log_dt.dtype), b_bar.to(log_dt.dtype)


def _backward(grad_a: Tensor, grad_b: Tensor, *inputs: Any) -> Any:
    *tensors, rule = inputs
    dtype = launch.working_dtype(*tensors)
    arrays = [array(x, dtype) for x in (grad_a, grad_b, *tensors)]
    found = [np.zeros_like(x) for x in arrays[2:]]
    discretize_kernel.backward(*arrays, *found, rule == "zoh")
    return found


def _empty(log_dt: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    shape = (len(log_dt), *others[2].shape[1:])
    return log_dt.new_empty(shape), log_dt.new_empty(shape)


discretize = KernelOp("discretize_kernel", _forward, _backward, _empty)
