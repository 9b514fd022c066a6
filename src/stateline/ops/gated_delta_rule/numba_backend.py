"""Gated delta rule for one token, in a kernel compiled by numba for the CPU.

Whole sequences are matrix products, which are left to PyTorch.
"""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.numba_kernels import tensors
from stateline.ops.numba_kernels.steps import gated_delta_step
from stateline.ops.numba_kernels.tensors import array
from stateline.ops.numba_kernels.threads import fan_out


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernel cannot run this call, or an empty string."""
    return tensors.can_step(*inputs)


def gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence once."""
    inputs = (q, k, v, log_decay, beta, state)
    dtype = tensors.working_dtype(*inputs)
    y, after = torch.empty(v.shape, dtype=dtype), torch.empty(state.shape, dtype=dtype)
    arrays = tuple(array(x, dtype) for x in (*inputs, y, after))
    fan_out(gated_delta_step, arrays, len(v), state.numel() * 1.0)
    return y.to(v.dtype), after.to(state.dtype)
