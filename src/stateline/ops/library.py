"""Define PyTorch operators from functions on tensors.

``torch.compile`` treats an operator as opaque, so that every layer compiles, even with an FFT.
Only the inputs of an operator are saved for the backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Forward = Callable[..., Tensor]
Backward = Callable[..., Sequence[Tensor]]


def define_op(name: str, forward: Forward, backward: Backward) -> Forward:
    """Register ``forward`` as the operator ``stateline::name`` with its own gradient.

    Both functions must be pure, take tensors and integers, and return new tensors. They may branch
    on shape, dtype and device, but not on values: they also run on tensors without data, to infer
    the shapes of the outputs.

    Args:
        name: Operator name, unique in the library.
        forward: ``forward(*inputs) -> output``, annotated with plain ``Tensor`` types
            (``Tensor | None`` for optional inputs, ``int`` for numbers).
        backward: ``backward(grad_output, *inputs) -> gradients`` of the first inputs, in order. The
            other inputs are constants. The entry of an input that is ``None`` is ignored. Annotated
            in the same way.

    Returns:
        A function with the signature of ``forward``, differentiable once.
    """
    op = torch.library.custom_op(f"stateline::{name}", forward, mutates_args=())
    op_backward = torch.library.custom_op(f"stateline::{name}_backward", backward, mutates_args=())
    op.register_fake(forward)
    op_backward.register_fake(backward)

    def save_inputs(ctx: Any, inputs: tuple[Tensor | int | None, ...], output: Tensor) -> None:  # noqa: ARG001
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]

    def run_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.numbers, strict=True)
        inputs = [number if tensor is None else tensor for tensor, number in pairs]
        gradients = [*op_backward(grad, *inputs), *[None] * len(inputs)]
        return tuple(g if isinstance(x, Tensor) else None for g, x in zip(gradients, inputs))  # noqa: B905

    op.register_autograd(run_backward, setup_context=save_inputs)
    return op
