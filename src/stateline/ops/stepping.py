"""Steps that change states in place, where a backend has no kernel of its own for them."""

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
