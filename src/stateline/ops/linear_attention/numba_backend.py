"""Linear attention for one token, in a kernel compiled by numba for the CPU.

Whole sequences are matrix products, which are left to PyTorch.
"""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.numba_kernels import steps, tensors
from stateline.ops.numba_kernels.tensors import array
from stateline.ops.numba_kernels.threads import fan_out


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernel cannot run this call, or an empty string."""
    return tensors.can_step(*inputs)


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence once."""
    decays = [] if log_decay is None else [log_decay]
    dtype = tensors.working_dtype(q, k, v, state, *decays)
    y, after = torch.empty(v.shape, dtype=dtype), torch.empty(state.shape, dtype=dtype)
    arguments = [None if x is None else array(x, dtype) for x in (q, k, v, log_decay, state)]
    outputs = (array(y, dtype), array(after, dtype))
    fan_out(steps.linear_attention_step, (*arguments, *outputs), len(v), state.numel() * 0.5)
    return y.to(v.dtype), after.to(state.dtype)
