"""Steps that change states in place, where a backend has no kernel of its own for them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Stepper = Callable[..., Tensor]
"""``stepper(*signals, *states)`` returns the output of one token and changes the states."""


def copying(
    step: Callable[..., tuple[Tensor, ...]], weights: Sequence[Tensor], n_states: int
) -> Stepper:
    """A stepper that computes new states and copies them over the old ones.

    Args:
        step: ``step(*signals, *weights, *states)`` returns the output and the new states.
        weights: Given to every step.
        n_states: Number of states.
    """

    def run(*inputs: Any) -> Tensor:
        states = inputs[len(inputs) - n_states :]
        y, *after = step(*inputs[: len(inputs) - n_states], *weights, *states)
        for old, new in zip(states, after, strict=True):
            old.copy_(new)
        return y

    return run
