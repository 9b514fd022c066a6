"""Single tokens on states that change in place: one launch per token."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from stateline.ops.planes import exponential
from stateline.ops.stepping import Stepper
from stateline.ops.triton_kernels.launch import empty, on, round_up

WIDTH = 16
"""Channels of a program."""


@triton.jit
def advance(x, count, total, column, weights, past, TAPS: tl.constexpr):
    """Filter one input after the past inputs (count, total), and move them on by one."""
    tap = tl.arange(0, TAPS)[:, None]
    there = (tap < count) & (column < total)[None, :]
    place = tap * total + column[None, :]
    old = tl.load(past + place, mask=there, other=0.0).to(tl.float32)
    weight = tl.load(weights + place, mask=there, other=0.0)
    now = tl.load(weights + count * total + column, mask=column < total, other=0.0)
    y = tl.sum(old * weight, axis=0) + now * x
    tl.debug_barrier()  # all of the past is read before any of it changes
    tl.store(past + place - total, old, mask=there & (tap > 0))
    if count > 0:
        tl.store(past + (count - 1) * total + column, x, mask=column < total)
    return y


@triton.jit
def recur(
    u, column, total, row, transition, b, c, skip, state, outputs,
    READOUTS: tl.constexpr, N: tl.constexpr, y, q, modes, GATED: tl.constexpr,
):  # fmt: skip
    """One step of the recurrence; each readout is written, with GATED times q."""
    mode = tl.arange(0, N)[None, :]
    there = (column < total)[:, None] & (mode < modes)
    place = (column[:, None] * modes + mode) * 2
    a_re = tl.load(transition + place, mask=there, other=0.0)
    a_im = tl.load(transition + place + 1, mask=there, other=0.0)
    own = state + row * total * modes * 2 + place
    x_re = tl.load(own, mask=there, other=0.0).to(tl.float32)
    x_im = tl.load(own + 1, mask=there, other=0.0).to(tl.float32)
    b_re = tl.load(b + place, mask=there, other=0.0)
    b_im = tl.load(b + place + 1, mask=there, other=0.0)
    drive = u[:, None]
    n_re = a_re * x_re - a_im * x_im + b_re * drive
    n_im = a_re * x_im + a_im * x_re + b_im * drive
    tl.store(own, n_re, mask=there)
    tl.store(own + 1, n_im, mask=there)
    for readout in tl.static_range(READOUTS):
        far = place + readout * total * modes * 2
        c_re = tl.load(c + far, mask=there, other=0.0)
        c_im = tl.load(c + far + 1, mask=there, other=0.0)
        output = readout * total + column
        o = 2 * tl.sum(c_re * n_re - c_im * n_im, axis=1)
        o += tl.load(skip + output, mask=column < total, other=0.0) * u
        if GATED:
            o *= q
        tl.store(y + row * outputs + output, o, mask=column < total)


@triton.jit
def h3(
    q, k, v, weights, transition, b, c, skip, past, state, y, count, total, modes,
    q_stride, k_stride, v_stride,
    TAPS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One token of the core of H3, with heads of one channel."""
    column, row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.program_id(1).to(tl.int64)
    inside = column < total
    key = tl.load(k + row * k_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(v + row * v_stride + column, mask=inside, other=0.0).to(tl.float32)
    query = tl.load(q + row * q_stride + column, mask=inside, other=0.0).to(tl.float32)
    own = past + row * count * total
    u = advance(key, count, total, column, weights, own, TAPS) * value
    recur(
        u, column, total, row, transition, b, c, skip, state, total,
        1, N, y, query, modes, True,
    )  # fmt: skip


@triton.jit
def diagonal(
    u, transition, b, c, skip, state, y, total, modes, stride,
    READOUTS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One input of a diagonal SSM."""
    column, row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.program_id(1).to(tl.int64)
    x = tl.load(u + row * stride + column, mask=column < total, other=0.0).to(tl.float32)
    recur(
        x, column, total, row, transition, b, c, skip, state, READOUTS * total,
        READOUTS, N, y, x, modes, False,
    )  # fmt: skip


@triton.jit
def filtered(
    u, weights, past, y, count, total, stride, TAPS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """One input of a short convolution."""
    column, row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.program_id(1).to(tl.int64)
    x = tl.load(u + row * stride + column, mask=column < total, other=0.0).to(tl.float32)
    o = advance(x, count, total, column, weights, past + row * count * total, TAPS)
    tl.store(y + row * total + column, o, mask=column < total)


def filter_stepper(weights: Tensor) -> Stepper:
    """A short convolution of many single inputs."""
    taps, (count, total) = weights.float().contiguous(), weights.shape

    def step(u: Tensor, past: Tensor) -> Tensor:
        u, y = u.contiguous(), empty(tuple(u.shape), u, past.dtype)
        with on(u), _changing(past) as (held,):
            filtered[_grid(total, u)](
                u, taps, held, y, count - 1, total, total, TAPS=_taps(count), WIDTH=WIDTH
            )
        return y.to(past.dtype)

    return step


def diagonal_stepper(log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Stepper:
    """A diagonal SSM for many single inputs."""
    constants = _constants(log_a, b, c, skip)
    total, modes = b.shape[:2]

    def step(u: Tensor, state: Tensor) -> Tensor:
        rows, y = u.reshape(-1, total).contiguous(), empty((*u.shape[:-1], len(c)), u)
        with on(u), _changing(state) as (held,):
            diagonal[_grid(total, rows)](
                rows, *constants, held, y, total, modes, total,
                READOUTS=len(c) // total, N=round_up(modes, 1), WIDTH=WIDTH,
            )  # fmt: skip
        return y.to(u.dtype)

    return step


def h3_stepper(weights: Tensor, log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Stepper:
    """The core of H3 for many single tokens."""
    constants = weights.float().contiguous(), *_constants(log_a, b, c, skip)
    (count, total), modes = weights.shape, b.shape[1]

    def step(q: Tensor, k: Tensor, v: Tensor, past: Tensor, state: Tensor) -> Tensor:
        y = empty(tuple(q.shape), q)
        signals = [x if x.stride(1) == 1 else x.contiguous() for x in (q, k, v)]
        with on(q), _changing(past, state) as held:
            h3[_grid(total, q)](
                *signals, *constants, *held, y, count - 1, total, modes,
                *(x.stride(0) for x in signals),
                TAPS=_taps(count), N=round_up(modes, 1), WIDTH=WIDTH,
            )  # fmt: skip
        return y.to(q.dtype)

    return step


def _grid(total: int, u: Tensor) -> tuple[int, int]:
    return -(-total // WIDTH), len(u)


@contextmanager
def _changing(*states: Tensor) -> Iterator[list[Tensor]]:
    """The memory of states that a kernel changes; of views with gaps, a copy that is put back."""
    held = [x.contiguous() for x in states]
    yield held
    for x, changed in zip(states, held, strict=True):
        if changed is not x:
            x.copy_(changed)


def _taps(count: int) -> int:
    return round_up(max(1, count - 1), 1)


def _constants(log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> tuple[Tensor, ...]:
    """What follows from the weights: transition, b, c and skip connection in float32."""
    transition = exponential(log_a.double()).expand(b.shape)
    return tuple(t.detach().to(torch.float32).contiguous() for t in (transition, b, c, skip))
