"""Steps that change states in place, where a backend has no kernel of its own for them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Stepper = Callable[..., Tensor]
"""``stepper(*signals, *states)`` returns the output of one token and changes the states."""


def in_float32(state: Tensor) -> Tensor:
    """A state in float32 at least, in which steps compute."""
    return state.to(torch.promote_types(state.dtype, torch.float32))


def copying(
    step: Callable[..., tuple[Tensor, ...]], weights: Sequence[Tensor], n_states: int
) -> Stepper:
    """A stepper that computes new states and copies them over the old ones.

    States may be kept in half precision; it computes in float32.

    Args:
        step: ``step(*signals, *weights, *states)`` returns the output and the new states.
        weights: Given to every step.
        n_states: Number of states.
    """

    def run(*inputs: Any) -> Tensor:
        states = inputs[len(inputs) - n_states :]
        wide = map(in_float32, states)
        y, *after = step(*inputs[: len(inputs) - n_states], *weights, *wide)
        for old, new in zip(states, after, strict=True):
            old.copy_(new)
        return y

    return run
