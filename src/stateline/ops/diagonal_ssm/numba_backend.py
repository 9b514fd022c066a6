"""Diagonal state space model by its recurrence, in kernels compiled by numba for the CPU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stateline.ops.diagonal_ssm.impulse_response import impulse_response
from stateline.ops.numba_kernels import tensors
from stateline.ops.numba_kernels.diagonal import backward, forward
from stateline.ops.numba_kernels.in_place import (
    Changing,
    diagonal_advance,
    rows_of,
    transitions,
)
from stateline.ops.numba_kernels.parameters import ROW_PIECES, Array, Coefficients
from stateline.ops.numba_kernels.steps import diagonal_step
from stateline.ops.numba_kernels.tensors import array, define_kernel_op, empty_like, flat, like
from stateline.ops.numba_kernels.threads import fan_out
from stateline.ops.short_conv.numba_backend import convolve
from stateline.ops.stepping import Stepper
from stateline.ops.thresholds import threshold

ROWS = 8
"""Rows from which on they may share one impulse response."""

FORWARD, BACKWARD, STEP = 0.1, 0.5, 0.5
"""Nanoseconds per position and mode, to tell whether threads pay."""


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    step = function == "diagonal_ssm_step"
    return tensors.can_step(*inputs) if step else tensors.can_use(*inputs)


def diagonal_ssm(u: Tensor, log_a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Run the recurrence from the zero state, with b as a factor of the output vector."""
    u, log_a, b, c = _one_readout(u, log_a, b, c)
    run = by_response if responds_briefly(u, b) else by_recurrence
    return run(u, log_a, b, c)


def by_response(u: Tensor, log_a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Convolve with the impulse response."""
    return convolve(u, impulse_response(log_a, b, c, u.shape[-2]))


def responds_briefly(u: Tensor, b: Tensor) -> bool:
    """Whether to convolve: for few tokens that is less work, if rows share the response."""
    length, modes = u.shape[-2], b.shape[1]
    longest = threshold("diagonal_ssm.by_response") * modes
    return u.shape[:-2].numel() >= ROWS and 0 < length <= longest


def diagonal_ssm_chunk(
    u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence from a state."""
    channels, readouts = u.shape[-1], len(c) // u.shape[-1]
    if u.shape[-2] == 1 and not can_use("diagonal_ssm_step", u, log_a, b, c, state):
        y, after = diagonal_ssm_step(u[..., 0, :], log_a, b, c, state)  # rounds better
        return y[..., None, :], after
    if readouts == 1:
        return _chunk(u, log_a, b, c, state)
    states = state.repeat(*[1] * (state.ndim - 3), readouts, 1, 1)
    y, after = _chunk(*_one_readout(u, log_a, b, c), states)
    return y, after[..., :channels, :, :].clone()  # a view would keep the memory of all readouts


def diagonal_ssm_step(
    u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence once."""
    dtype = tensors.working_dtype(u, log_a, b, c, state)
    y = torch.empty((*u.shape[:-1], len(c)), dtype=dtype)
    after = torch.empty(state.shape, dtype=dtype)
    signals = [array(t, dtype).reshape(-1, t.shape[-1]) for t in (u, y)]
    states = [array(t, dtype).reshape(-1, len(b), 2 * b.shape[1]) for t in (state, after)]
    vectors = [array(t, dtype).reshape(len(t), -1) for t in (log_a, b, c)]
    arguments = (signals[0], *vectors, states[0], signals[1], states[1])
    fan_out(diagonal_step, arguments, len(b), state.numel() / 2 * STEP)
    return y.to(u.dtype), after.to(state.dtype)


def diagonal_ssm_stepper(log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Stepper:
    """The recurrence for many inputs, on a state that changes in place."""
    dtype = tensors.working_dtype(log_a, b, c, skip)
    constants = transitions(log_a, dtype), *rows_of(dtype, b, c), array(skip, dtype)
    channels, width, outputs = len(b), 2 * b.shape[1], len(c)

    def step(u: Tensor, state: Tensor) -> Tensor:
        y = torch.empty((*u.shape[:-1], outputs), dtype=dtype)
        work = state.numel() / 2 * STEP
        with Changing(dtype, state) as (x,):
            signal = array(u, dtype).reshape(-1, channels)
            places = x.reshape(-1, channels, width), y.numpy().reshape(-1, outputs)
            fan_out(diagonal_advance, (signal, *constants, *places), channels, work)
        return y.to(u.dtype)

    return step


def _one_readout(
    u: Tensor, log_a: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs with a channel for every output: several readouts of a channel run side by side."""
    readouts = len(c) // u.shape[-1]
    if readouts == 1:
        return u, log_a, b, c
    if len(log_a) > 1:
        log_a = log_a.repeat(readouts, 1, 1)
    return u.repeat([1] * (u.ndim - 1) + [readouts]), log_a, b.repeat(readouts, 1, 1), c


def _prepare(*inputs: Tensor) -> tuple[Coefficients, Array, tuple[int, int, int], int]:
    """Coefficients, input signal, sizes, and number of rows."""
    u, log_a, b, c, *state = inputs
    call = Coefficients(log_a, b, c, tensors.working_dtype(*inputs), fold=not state)
    sizes = u.shape[-2], call.channels, call.modes
    return call, flat(u, call.dtype), sizes, u.shape[:-2].numel()


def _forward(u: Tensor, log_a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    call, signal, sizes, rows = _prepare(u, log_a, b, c)
    y = torch.empty(u.shape, dtype=call.dtype)
    arguments = (signal, flat(y, call.dtype), call.packed, None, None, *sizes)
    fan_out(forward, arguments, rows * call.blocks, u.numel() * call.modes * FORWARD)
    return y.to(u.dtype)


def _forward_chunk(
    u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    call, signal, sizes, rows = _prepare(u, log_a, b, c, state)
    y, after = (torch.empty(x.shape, dtype=call.dtype) for x in (u, state))
    states = (flat(x, call.dtype) for x in (state, after))
    arguments = (signal, flat(y, call.dtype), call.packed, *states, *sizes)
    fan_out(forward, arguments, rows * call.blocks, u.numel() * call.modes * FORWARD)
    return y.to(u.dtype), after.to(state.dtype)


def _gradients(grad: Tensor, grad_after: Tensor | None, *inputs: Tensor) -> list[Array]:
    call, signal, sizes, rows = _prepare(*inputs)
    du, pieces = np.empty_like(signal), max(1, min(rows, ROW_PIECES))
    packed = call.empty_gradients(pieces)
    before = end = start = None
    if grad_after is not None:
        end, before = flat(grad_after, call.dtype), flat(inputs[4], call.dtype)
        start = np.empty_like(before)
    signals = (flat(grad, call.dtype), end, signal, du)
    arguments = (*signals, call.packed, before, start, packed, rows, *sizes, pieces)
    fan_out(backward, arguments, pieces * call.blocks, signal.size * call.modes * BACKWARD)
    found = [du, *call.unpack(packed, pieces)]
    return found if start is None else [*found, start]


def _backward(
    grad: Tensor, u: Tensor, log_a: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = (u, log_a, b, c)
    return like(_gradients(grad, None, *inputs), inputs)


def _backward_chunk(
    grad: Tensor, grad_after: Tensor, u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (u, log_a, b, c, state)
    return like(_gradients(grad, grad_after, *inputs), inputs)


by_recurrence = define_kernel_op(
    "diagonal_ssm_kernel",
    _forward,
    _backward,
    lambda u, *_: empty_like(u)[0],
    lambda _grad, *inputs: empty_like(*inputs),
)
_chunk = define_kernel_op(
    "diagonal_ssm_chunk_kernel",
    _forward_chunk,
    _backward_chunk,
    lambda *inputs: empty_like(inputs[0], inputs[4]),
    lambda _grad, _grad_after, *inputs: empty_like(*inputs),
)
