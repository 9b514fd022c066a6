"""Discretisation in one pass over all modes, in kernels compiled by numba for the CPU.

As many small operators of PyTorch, it takes longer than a whole short sequence.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stateline.ops.discretization import Discretization
from stateline.ops.discretize.numba_kernel import backward, forward
from stateline.ops.kernel_op import define_kernel_op, like
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import array


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernels cannot run this call, or an empty string."""
    return launch.can_use(*inputs)


def discretize(
    log_dt: Tensor, decay: Tensor, frequency: Tensor, b: Tensor, rule: Discretization
) -> tuple[Tensor, Tensor]:
    """Apply the kernel of the rule."""
    log_a, b_bar = _RULES[rule](log_dt, decay, frequency, b)
    return log_a, b_bar


def _empty(log_dt: Tensor, decay: Tensor, _frequency: Tensor, _b: Tensor) -> tuple[Tensor, Tensor]:
    shape = (len(log_dt), decay.shape[1], 2)
    return log_dt.new_empty(shape), log_dt.new_empty(shape)


def _define(rule: Discretization) -> Callable[..., Any]:
    """The differentiable function of one rule."""
    zoh = rule == "zoh"

    def run(log_dt: Tensor, decay: Tensor, frequency: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        inputs = (log_dt, decay, frequency, b)
        dtype = launch.working_dtype(*inputs)
        found = [torch.empty((len(log_dt), decay.shape[1], 2), dtype=dtype) for _ in "ab"]
        forward(*(array(x, dtype) for x in inputs), *(x.numpy() for x in found), zoh)
        log_a, b_bar = (x.to(log_dt.dtype) for x in found)
        return log_a, b_bar

    def gradients(
        grad_a: Tensor, grad_b: Tensor, log_dt: Tensor, decay: Tensor, frequency: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = (log_dt, decay, frequency, b)
        dtype = launch.working_dtype(*inputs)
        arrays = [array(x, dtype) for x in (grad_a, grad_b, *inputs)]
        found = [np.zeros_like(x) for x in arrays[2:]]
        backward(*arrays, *found, zoh)
        log_dt_, decay_, frequency_, b_ = like(found, inputs)
        return log_dt_, decay_, frequency_, b_

    return define_kernel_op(
        f"discretize_{rule}_kernel",
        run,
        gradients,
        _empty,
        lambda _a, _b, *inputs: tensors.empty_like(*inputs),
    )


_RULES = {"zoh": _define("zoh"), "bilinear": _define("bilinear")}
