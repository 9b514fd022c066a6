"""Cross entropy in one pass forward and one back, in kernels compiled by numba for the CPU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stateline.ops.cross_entropy.numba_kernel import backward, forward
from stateline.ops.kernel_op import is_plain
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import array, fan_out, flat

FEW_CLASSES, MANY_LOGITS = 16, 1 << 16
"""Classes below which, and logits from which on, the kernels are faster than PyTorch's."""


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernels cannot run this call, or an empty string."""
    logits, targets = inputs
    if torch.compiler.is_compiling() or not is_plain(logits):
        return "compiled functions and sharded logits take PyTorch's operators"
    if logits.dtype not in (torch.float32, torch.float64):
        return "the numba kernel takes float32 and float64"
    if logits.shape[1] >= FEW_CLASSES and logits.numel() < MANY_LOGITS:
        return "PyTorch's function is faster for few logits"
    if not (targets.is_cpu and targets.numel()) or int(targets.max()) >= logits.shape[1]:
        return "each row needs a target on the CPU, and a target must be a class"
    return launch.can_use(logits)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Apply the kernels."""
    loss: Tensor = _Recorded.apply(logits, targets)
    return loss


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        x, losses = array(logits, logits.dtype), np.empty(len(logits))
        norms = np.empty(len(logits), x.dtype)
        arrays = x, array(targets, torch.int64), norms, losses
        fan_out(forward, arrays, len(x), 0.7 * x.size)
        ctx.save_for_backward(logits, targets)
        ctx.norms = norms
        return logits.new_tensor(losses.sum())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, targets = ctx.saved_tensors
        found = torch.empty(logits.shape, dtype=logits.dtype)
        arrays = array(logits, logits.dtype), array(targets, torch.int64), ctx.norms, found.numpy()
        fan_out(backward, (*arrays, flat(grad, logits.dtype)), len(logits), 0.7 * found.numel())
        return found, None
