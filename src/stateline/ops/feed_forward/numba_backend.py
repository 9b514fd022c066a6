"""Feed-forward for training: bias, GELU and its derivative in one pass of a numba kernel.

PyTorch's matrix products are faster without a bias, and the derivative, kept in place of the input
of GELU, spares the backward pass the exponentials.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stateline.ops.dispatch import wants_gradient
from stateline.ops.feed_forward.numba_kernel import gelu_of_sum
from stateline.ops.kernel_op import is_plain
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import array, fan_out


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernel cannot run this call, or an empty string."""
    x = inputs[0]
    if not wants_gradient(*inputs):
        return "without a gradient, PyTorch's linear maps are as fast"
    if torch.compiler.is_compiling() or not all(map(is_plain, inputs)):
        return "compiled functions and sharded weights take PyTorch's operators"
    same = all(t.dtype == x.dtype for t in inputs)
    if not same or x.dtype not in (torch.float32, torch.float64):
        return "the numba kernel takes one precision, float32 or float64"
    if x.is_cpu and torch.is_autocast_enabled("cpu"):
        return "autocast chooses another precision"
    return launch.can_use(*inputs)


def feed_forward(x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
    """Apply both maps and record the gradient."""
    y: Tensor = _Recorded.apply(x.reshape(-1, x.shape[-1]), w_in, b_in, w_out, b_out)
    return y.view(*x.shape[:-1], len(w_out))


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor
    ) -> Tensor:
        h = x @ w_in.T
        z = torch.empty_like(h)
        arrays = h.numpy(), array(b_in, x.dtype), z.numpy()
        fan_out(gelu_of_sum, arrays, len(h), 1.5 * h.numel())
        ctx.save_for_backward(x, z, h, w_in, w_out)  # h holds the derivative now
        return (z @ w_out.T).add_(b_out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, z, slope, w_in, w_out = ctx.saved_tensors
        of_h = (grad @ w_out).mul_(slope)
        return of_h @ w_in, of_h.T @ x, of_h.sum(0), grad.T @ z, grad.sum(0)
