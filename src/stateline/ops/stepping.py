"""Recurrences, from the function of one step."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Stepper = Callable[..., Tensor]
"""``stepper(*signals, state)`` returns the output of one token and changes the state."""


def over_time(step: Callable[..., tuple[Tensor, Tensor]], like: str) -> Callable[..., Any]:
    """The recurrence over whole sequences, one token after the other.

    Args:
        step: ``step(x, state)`` returns the output and the new state, where x is a named tuple of
            signals without the axis of time.
        like: The signal that gives the outputs their shape where there are no tokens.
    """

    def run(x: Any, state: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        outputs = [getattr(x, like)[:, :0]]
        for t, token in enumerate(tokens(x)):
            if starts is not None:
                begins = starts[:, t].view(-1, *[1] * (state.ndim - 1))
                state = state.masked_fill(begins, 0.0)
            y, state = step(token, state)
            outputs.append(y[:, None])
        return torch.cat(outputs, dim=1), state

    return run


def over_chunks(step: Callable[..., tuple[Tensor, Tensor]], size: int) -> Callable[..., Any]:
    """The recurrence over whole sequences, one chunk of ``size`` tokens after the other.

    Args:
        step: ``step(*signals, state)`` returns the outputs and the new state, for the signals of a
            chunk (batch, head, length, ...) in the dtype of the state.
        size: Tokens of a chunk.
    """

    def run(x: Any, state: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if x.v.shape[1] == 0:
            return x.v.clone(), state.clone()
        signals = (signal.to(state.dtype).transpose(1, 2) for signal in x.reset(starts))
        outputs = []
        for chunk in zip(*(signal.split(size, dim=2) for signal in signals), strict=True):
            y, state = step(*chunk, state)
            outputs.append(y)
        return torch.cat(outputs, dim=2).transpose(1, 2).to(x.v.dtype), state

    return run


def one_token(whole: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """A step, from the function of whole sequences, ``whole(*signals, weights, state)``."""

    def step(*inputs: Any) -> tuple[Tensor, Any]:
        *signals, weights, state = inputs
        y, after = whole(*(x[..., None, :] for x in signals), weights, state)
        return y[..., 0, :], after

    return step


def tokens(x: Any) -> Iterator[Any]:
    """The signals of one token after the other, from signals (batch, length, ...)."""
    for t in range(x[0].shape[1]):
        yield type(x)(*(None if signal is None else signal[:, t] for signal in x))


def copying(step: Callable[..., tuple[Tensor, Any]]) -> Stepper:
    """A step in place, from one that returns a new state, which is copied over the old one.

    States may be kept in half precision; it computes in float32.

    Args:
        step: ``step(*signals, state)`` returns the output and the new state, a tensor or a named
            tuple of tensors.
    """

    def run(*inputs: Any) -> Tensor:
        *signals, state = inputs
        if isinstance(state, Tensor):
            y, after = step(*signals, wide(state))
            state.copy_(after)
            return y
        y, after = step(*signals, type(state)(*map(wide, state)))
        for old, new in zip(state, after, strict=True):
            old.copy_(new)
        return y

    return run


def wide(state: Tensor) -> Tensor:
    """A state in float32 at least, in which backends compute."""
    return state.to(torch.promote_types(state.dtype, torch.float32))


def on_a_copy(step_: Stepper) -> Callable[..., tuple[Tensor, Any]]:
    """A step that returns a new state, from one that changes its state in place."""

    def run(*inputs: Any) -> tuple[Tensor, Any]:
        *signals, state = inputs
        after = state.clone(memory_format=torch.contiguous_format)
        return step_(*signals, after), after

    return run


def zeros_before(x: Tensor, *shape: int) -> Tensor:
    """The zero state before the signal x, in float32 at least."""
    return x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32))
