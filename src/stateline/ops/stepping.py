"""Conversion between steps that change a state in place and steps that return a new state."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stateline.ops.dispatch import tensors_of

Stepper = Callable[..., Tensor]
"""``stepper(*signals, state)`` returns the output of one token and changes the state."""


def in_float32(state: Tensor) -> Tensor:
    """A state in float32 at least, in which steps compute."""
    return state.to(torch.promote_types(state.dtype, torch.float32))


def copying(step: Callable[..., tuple[Tensor, Any]]) -> Stepper:
    """A stepper that computes a new state and copies it over the old one.

    States may be kept in half precision; it computes in float32.

    Args:
        step: ``step(*signals, state)`` returns the output and the new state, a tensor or a named
            tuple of tensors.
    """

    def run(*inputs: Any) -> Tensor:
        *signals, state = inputs
        wide = (
            in_float32(state) if isinstance(state, Tensor) else type(state)(*map(in_float32, state))
        )
        y, after = step(*signals, wide)
        for old, new in zip(tensors_of((state,)), tensors_of((after,)), strict=True):
            old.copy_(new)
        return y

    return run


def on_a_copy(step_: Stepper) -> Callable[..., tuple[Tensor, Tensor]]:
    """A step that returns a new state, from one that changes its state in place.

    Args:
        step_: ``step_(*signals, state)`` returns the output.
    """

    def run(*inputs: Any) -> tuple[Tensor, Tensor]:
        *signals, state = inputs
        after = state.clone(memory_format=torch.contiguous_format)
        return step_(*signals, after), after

    return run


def zeros_before(x: Tensor, *shape: int) -> Tensor:
    """The zero state before the signal x, in float32 at least."""
    return x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32))
