"""Differentiable functions from a forward and a backward function on tensors.

Only the inputs are saved for the backward pass. Where a graph is captured (``torch.compile``), the
function is one opaque PyTorch operator, so that every layer compiles, even with an FFT or a kernel.
Elsewhere it is an autograd function, which costs several times less to record.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from stateline.ops.dispatch import wants_gradient

_PLAIN = (Tensor, torch.nn.Parameter)


def define_kernel_op(
    name: str,
    forward: Callable[..., Tensor | tuple[Tensor, ...]],
    backward: Callable[..., Sequence[Tensor]],
    fake: Callable[..., Tensor | tuple[Tensor, ...]] | None = None,
    fake_backward: Callable[..., Sequence[Tensor]] | None = None,
) -> Callable[..., Any]:
    """Make one function, differentiable once, of a forward and a backward function.

    Both must be pure and return new tensors. They may branch on shape, dtype and device, but not on
    values.

    Args:
        name: Operator name, unique in the library.
        forward: ``forward(*inputs) -> outputs``, annotated with plain types (``Tensor``,
            ``Tensor | None``, ``int``).
        backward: ``backward(*grad_outputs, *inputs) -> gradients`` of the first inputs, in order;
            the other inputs are constants. The entry of an input that is ``None`` is ignored. Also
            annotated.
        fake: Like ``forward``, for tensors without data: empty outputs of the right shapes. By
            default ``forward`` itself, which must then be made of PyTorch's functions.
        fake_backward: Likewise for ``backward``; by default, with ``fake``, gradients like the
            inputs.

    Returns:
        A function with the signature of ``forward``.
    """
    op = torch.library.custom_op(f"stateline::{name}", forward, mutates_args=())
    op_backward = torch.library.custom_op(
        f"stateline::{name}_backward", _apart(backward), mutates_args=()
    )
    count = len(inspect.signature(forward).parameters)
    empty = backward if fake is None else lambda *given: empty_like(*given[-count:])
    op.register_fake(fake or forward)
    op_backward.register_fake(fake_backward or empty)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any = None) -> None:  # noqa: ARG001
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]

    def gradients(run: Callable[..., Sequence[Tensor]], ctx: Any, grads: Any) -> tuple[Any, ...]:
        pairs = zip(ctx.saved_tensors, ctx.numbers, strict=True)
        inputs = [number if tensor is None else tensor for tensor, number in pairs]
        found = [*run(*grads, *inputs), *[None] * len(inputs)]
        return tuple(g if isinstance(x, Tensor) else None for g, x in zip(found, inputs))  # noqa: B905

    op.register_autograd(lambda ctx, *grads: gradients(op_backward, ctx, grads), setup_context=save)

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            save(ctx, inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            # PyTorch knows that the operator's result cannot be differentiated again
            return gradients(op_backward if torch.is_grad_enabled() else backward, ctx, grads)

    def run(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not is_plain(inputs[0]):
            return op(*inputs)
        if wants_gradient(*inputs):
            return Recorded.apply(*inputs)
        return forward(*inputs)

    return run


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is of no subclass, such as a sharded parameter."""
    return type(x) in _PLAIN


def values_at_hand(x: Tensor) -> bool:
    """Whether a tensor has values, and reading them costs no device synchronisation."""
    return x.device.type == "cpu" and is_plain(x) and not torch.compiler.is_compiling()


def like(gradients: Sequence[Any], inputs: Sequence[Tensor]) -> Any:
    """Gradients (arrays or tensors) with the shapes and dtypes of their inputs."""
    pairs = zip(gradients, inputs, strict=True)
    return tuple(torch.as_tensor(g).reshape(x.shape).to(x.dtype) for g, x in pairs)


def empty_like(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Contiguous tensors of the same shapes, dtypes and device."""
    return tuple(x.new_empty(x.shape) for x in inputs)


def _apart(backward: Callable[..., Sequence[Tensor]]) -> Callable[..., Any]:
    """The same with gradients that share no memory: operators must not return views of a tensor."""

    @wraps(backward)
    def run(*inputs: Any) -> Any:
        found = backward(*inputs)
        return tuple(g.clone() if g.untyped_storage().nbytes() > g.nbytes else g for g in found)

    return run
