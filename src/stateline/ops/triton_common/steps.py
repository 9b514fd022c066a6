"""Single tokens on states that change in place: one launch per token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stateline.ops.planes import exponential
from stateline.ops.stepping import Stepper
from stateline.ops.triton_common import tokens
from stateline.ops.triton_common.launch import empty, on, round_up

WIDTH = 16
"""Channels of a program."""


def filter_stepper(weights: Tensor) -> Stepper:
    """A short convolution of many single inputs."""
    taps, (count, total) = weights.float().contiguous(), weights.shape

    def step(u: Tensor, past: Tensor) -> Tensor:
        dtype = torch.promote_types(u.dtype, past.dtype)
        u, y = u.contiguous(), empty(tuple(u.shape), u, dtype)
        with on(u), changing(past) as (held,):
            tokens.filtered[_grid(total, u)](
                u, taps, held, y, count - 1, total, total, TAPS=_taps(count), WIDTH=WIDTH
            )
        return y.to(dtype)

    return step


def diagonal_stepper(weights: Any, skip: Tensor) -> Stepper:
    """A diagonal SSM for many single inputs."""
    _, b, c = weights
    constants, (total, modes) = _constants(weights, skip), b.shape[:2]

    def step(u: Tensor, state: Tensor) -> Tensor:
        rows, y = u.reshape(-1, total).contiguous(), empty((*u.shape[:-1], len(c)), u)
        with on(u), changing(state) as (held,):
            tokens.diagonal[_grid(total, rows)](
                rows, *constants, held, y, total, modes, total,
                READOUTS=len(c) // total, N=round_up(modes, 1), WIDTH=WIDTH,
            )  # fmt: skip
        return y.to(u.dtype)

    return step


def h3_stepper(weights: Any) -> Stepper:
    """The core of H3 for many single tokens."""
    taps, diagonal, skip = weights
    constants = taps.float().flip(-1).mT.contiguous(), *_constants(diagonal, skip)
    (total, count), modes = taps.shape, diagonal.b.shape[1]

    def step(q: Tensor, k: Tensor, v: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        y = empty(tuple(q.shape), q)
        signals = [x if x.stride(1) == 1 else x.contiguous() for x in (q, k, v)]
        with on(q), changing(*state) as held:
            tokens.h3[_grid(total, q)](
                *signals, *constants, *held, y, count - 1, total, modes,
                *(x.stride(0) for x in signals),
                TAPS=_taps(count), N=round_up(modes, 1), WIDTH=WIDTH,
            )  # fmt: skip
        return y.to(q.dtype)

    return step


def _grid(total: int, u: Tensor) -> tuple[int, int]:
    return -(-total // WIDTH), len(u)


@contextmanager
def changing(*states: Tensor) -> Iterator[list[Tensor]]:
    """The memory of states that a kernel changes; for views with gaps, a copy to write back."""
    held = [x.contiguous() for x in states]
    yield held
    for x, changed in zip(states, held, strict=True):
        if changed is not x:
            x.copy_(changed)


def _taps(count: int) -> int:
    return round_up(max(1, count - 1), 1)


def _constants(weights: Any, skip: Tensor) -> tuple[Tensor, ...]:
    """The prepared weights: transition, b, c and skip connection in float32."""
    log_a, b, c = weights
    transition = exponential(log_a.double()).expand(b.shape)
    return tuple(t.detach().to(torch.float32).contiguous() for t in (transition, b, c, skip))
