"""The one place where a function on tensors becomes a PyTorch operator.

An operator is opaque to ``torch.compile`` (which therefore sees through every layer, FFT or not)
and saves nothing for the backward pass but its inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Forward = Callable[..., Tensor]
Backward = Callable[..., Sequence[Tensor]]


def define_op(name: str, forward: Forward, backward: Backward) -> Forward:
    """Register ``forward`` as the operator ``stateline::name`` with its own gradient.

    Both functions must be pure, work on tensors and integers, return fresh tensors, and choose
    their path by shape, dtype and device only, never by value: they are also run on tensors without
    data, to learn the shapes of their results.

    Args:
        name: Operator name, unique in the library.
        forward: ``forward(*inputs) -> output``, annotated with plain ``Tensor`` types
            (``Tensor | None`` where an input may be absent, ``int`` where it is a number).
        backward: ``backward(grad_output, *inputs) -> gradients`` of the first inputs, in order;
            the remaining inputs are constants; what stands for an absent input is not looked at.
            Also annotated.

    Returns:
        A function with the signature of ``forward`` that autograd differentiates once.
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
