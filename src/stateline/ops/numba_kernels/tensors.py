"""Between PyTorch's tensors and the kernels: arrays, gradients, and what a kernel can take."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stateline.ops.backend import wants_gradient

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_PLAIN = (Tensor, torch.nn.Parameter)
_TYPES = {torch.float32: "=f4", torch.float64: "=f8", torch.int64: "=i8"}


def can_use(*inputs: Any) -> str:
    """Why kernels cannot take these inputs, or an empty string."""
    for x in inputs:
        if isinstance(x, Tensor):
            if not x.is_cpu:
                return f"numba runs on the CPU, not on {x.device.type}"
            if x.dtype not in FLOATS:
                return f"numba takes floats, not {x.dtype}"
    return ""


def can_step(*inputs: Any) -> str:
    """Why a kernel for one token cannot take these inputs, or an empty string."""
    if wants_gradient(*inputs):
        return "the numba step records no gradient"
    if torch.compiler.is_compiling():
        return "torch.compile fuses the step itself"
    return can_use(*inputs)


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is of no subclass, such as those of sharded parameters."""
    return type(x) in _PLAIN


def working_dtype(*inputs: Tensor) -> torch.dtype:
    """The precision that kernels compute in: float64 if any input has it, else float32."""
    wide = any(x.dtype == torch.float64 for x in inputs)
    return torch.float64 if wide else torch.float32


def array(x: Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """The entries of a tensor: without a copy if it is contiguous and of the dtype."""
    x = x.detach() if x.requires_grad else x
    if x.dtype is not dtype:
        x = x.to(dtype)
    return _memory(x.contiguous())


def flat(x: Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """The same with a single axis."""
    return array(x, dtype).reshape(-1)


def define_kernel_op(
    name: str,
    forward: Callable[..., Tensor | tuple[Tensor, ...]],
    backward: Callable[..., tuple[Tensor, ...]],
    fake: Callable[..., Tensor | tuple[Tensor, ...]],
    fake_backward: Callable[..., tuple[Tensor, ...]],
) -> Callable[..., Any]:
    """Make one differentiable function of a forward and a backward kernel.

    It is a PyTorch operator only where a graph is being captured (``torch.compile``): recording an
    operator costs several times as much as an autograd function, and a direct call adds nothing.

    Args:
        name: Operator name, unique in the library.
        forward: ``forward(*inputs) -> outputs``, annotated with plain tensor types. Saves nothing.
        backward: ``backward(*grad_outputs, *inputs) -> gradients`` of all inputs; also annotated.
        fake: Like ``forward``, but on tensors without data: empty outputs of the right shapes.
        fake_backward: Likewise for ``backward``.

    Returns:
        A function with the signature of ``forward`` that autograd differentiates once.
    """
    op = torch.library.custom_op(f"stateline::{name}", forward, mutates_args=())
    op_backward = torch.library.custom_op(
        f"stateline::{name}_backward", _apart(backward), mutates_args=()
    )
    op.register_fake(fake)
    op_backward.register_fake(fake_backward)
    op.register_autograd(
        lambda ctx, *grads: tuple(op_backward(*grads, *ctx.saved_tensors)),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),  # noqa: ARG005
    )

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Any:
            ctx.save_for_backward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            # of the operator, PyTorch knows that its result cannot be differentiated again
            run = op_backward if torch.is_grad_enabled() else backward
            return run(*grads, *ctx.saved_tensors)

    def run(*inputs: Tensor) -> Any:
        if torch.compiler.is_compiling() or not is_plain(inputs[0]):
            return op(*inputs)
        if wants_gradient(*inputs):
            return Recorded.apply(*inputs)
        return forward(*inputs)

    return run


def _apart(
    backward: Callable[..., tuple[Tensor, ...]],
) -> Callable[..., tuple[Tensor, ...]]:
    """The same with gradients that share no memory: operators must not return views of a tensor."""

    @wraps(backward)
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        gradients = backward(*inputs)
        return tuple(g.clone() if g.untyped_storage().nbytes() > g.nbytes else g for g in gradients)

    return run


def like(gradients: Sequence[NDArray[Any] | Tensor], inputs: Sequence[Tensor]) -> Any:
    """Gradients with the shape and dtype of the inputs they belong to."""
    pairs = zip(gradients, inputs, strict=True)
    return tuple(torch.as_tensor(g).reshape(x.shape).to(x.dtype) for g, x in pairs)


def empty_like(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Contiguous tensors of the same shapes, dtypes and device."""
    return tuple(x.new_empty(x.shape) for x in inputs)


def strided(x: Tensor, dtype: torch.dtype) -> tuple[NDArray[Any], int]:
    """A signal (..., length, channel) as a flat array, and the entries from token to token.

    A slice of the last axis of a contiguous tensor is taken as it is: the array then holds what
    lies between its tokens, too.
    """
    *batch, length, channels = x.shape
    stride = x.stride(-2)
    fits = x.dtype is dtype and x.numel() > 0 and x.stride(-1) == 1
    expected = length * stride
    for size, between in zip(reversed(batch), reversed(x.stride()[:-2]), strict=True):
        fits, expected = fits and between == expected, expected * size
    if not fits:
        return flat(x, dtype), channels
    size = (x.shape[:-1].numel() - 1) * stride + channels
    return _memory(x.detach().as_strided((size,), (1,))), stride


class _Memory:
    """The entries of a contiguous tensor, in the form that NumPy asks for."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # keeps the memory alive as long as the array
        self.__array_interface__ = {
            "version": 3,
            "shape": tensor.shape,
            "typestr": _TYPES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
        }


def _memory(x: Tensor) -> NDArray[Any]:
    """Like ``x.numpy()``, after which no storage can be resized: FSDP frees parameters that way."""
    if not x.numel():  # an empty tensor is at address 0, which NumPy before 2.4 refuses
        return np.empty(x.shape, _TYPES[x.dtype])
    return np.asarray(_Memory(x))
