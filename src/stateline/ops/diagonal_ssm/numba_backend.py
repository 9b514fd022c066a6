"""Diagonal state space model by its recurrence, in kernels compiled by numba for the CPU."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stateline.ops.diagonal_ssm import DiagonalWeights
from stateline.ops.diagonal_ssm.numba_kernel import backward, forward
from stateline.ops.diagonal_ssm.numba_parameters import ROW_PIECES, Array, Coefficients
from stateline.ops.diagonal_ssm.step_kernel import diagonal_advance, rows_of, transitions
from stateline.ops.kernel_op import define_kernel_op, empty_like, like
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import (
    Changing,
    array,
    borders_of,
    fan_out,
    flat,
    of_token,
    output,
)
from stateline.ops.stepping import Stepper

FORWARD, BACKWARD, STEP = 0.1, 0.5, 0.5
"""Nanoseconds per position and mode, to tell whether threads pay."""


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    step = function == "diagonal_ssm_step"
    return launch.can_step(*inputs) if step else launch.can_use(*inputs)


def diagonal_ssm(
    u: Tensor, weights: DiagonalWeights, state: Tensor | None, starts: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Run the recurrence; without a state, b is a factor of the output vector."""
    channels, readouts = u.shape[-1], len(weights.c) // u.shape[-1]
    if state is None:
        u, weights = _one_readout(u, weights)
        return _whole(u, *weights, starts), None
    if u.shape[-2] == 1 and starts is None and not can_use("diagonal_ssm_step", u, weights, state):
        y, after = diagonal_ssm_step(u[..., 0, :], weights, state)  # rounds better
        return y[..., None, :], after
    if readouts == 1:
        return _chunk(u, *weights, state, starts)
    states = state.repeat(*[1] * (state.ndim - 3), readouts, 1, 1)
    u, weights = _one_readout(u, weights)
    y, after = _chunk(u, *weights, states, starts)
    return y, after[..., :channels, :, :].clone()  # a view would keep the memory of all readouts


def diagonal_ssm_step(u: Tensor, weights: DiagonalWeights, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence once, on a copy of the state."""
    after = state.clone(memory_format=torch.contiguous_format)
    skip = weights.b.new_zeros(len(weights.c))
    return diagonal_ssm_stepper(weights, skip)(u, after), after


def diagonal_ssm_stepper(weights: DiagonalWeights, skip: Tensor) -> Stepper:
    """The recurrence for many inputs, on a state that changes in place."""
    log_a, b, c = weights
    dtype = launch.working_dtype(log_a, b, c, skip)
    constants = transitions(log_a, dtype), *rows_of(dtype, b, c), array(skip, dtype)
    channels, width, outputs = len(b), 2 * b.shape[1], len(c)

    def step(u: Tensor, state: Tensor) -> Tensor:
        y, read = output((*u.shape[:-1], outputs), dtype)
        work = state.numel() / 2 * STEP
        with Changing(dtype, state) as (x,):
            signal = of_token(u, dtype).reshape(-1, channels)
            places = x.reshape(-1, channels, width), read.reshape(-1, outputs)
            fan_out(diagonal_advance, (signal, *constants, *places), channels, work)
        return y.to(u.dtype)

    return step


def _one_readout(u: Tensor, weights: DiagonalWeights) -> tuple[Tensor, DiagonalWeights]:
    """A channel for every output: several readouts of a channel run side by side."""
    (log_a, b, c), readouts = weights, len(weights.c) // u.shape[-1]
    if readouts == 1:
        return u, weights
    if len(log_a) > 1:
        log_a = log_a.repeat(readouts, 1, 1)
    u = u.repeat([1] * (u.ndim - 1) + [readouts])
    return u, DiagonalWeights(log_a, b.repeat(readouts, 1, 1), c)


def _prepare(
    inputs: Sequence[Tensor], starts: Tensor | None = None
) -> tuple[Coefficients, Array, Array, tuple[int, int]]:
    """Coefficients, input signal, borders of the rows, and sizes."""
    u, log_a, b, c, *state = inputs
    call = Coefficients(log_a, b, c, launch.working_dtype(*inputs), fold=not state)
    borders = borders_of(u.shape[:-1], starts)
    return call, flat(u, call.dtype), borders, (call.channels, call.modes)


def _forward(u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, starts: Tensor | None) -> Tensor:
    call, signal, borders, sizes = _prepare((u, log_a, b, c), starts)
    y = torch.empty(u.shape, dtype=call.dtype)
    arguments = (signal, flat(y, call.dtype), call.packed, None, None, borders, *sizes)
    tasks = (len(borders) - 1) * call.blocks
    fan_out(forward, arguments, tasks, u.numel() * call.modes * FORWARD)
    return y.to(u.dtype)


class _Ends(NamedTuple):
    """Of packed rows, the documents with which each begins and ends.

    Attributes:
        documents: Number of all documents.
        first: Numbers of those that rows begin with.
        last: Numbers of those that rows end with.
        goes_on: Whether a state continues the first one (row, 1).
    """

    documents: int
    first: Array
    last: Array
    goes_on: Array

    def spread(self, rows: Array, places: Array) -> Array:
        """States of rows at these documents, and zeros at all others."""
        states = np.zeros((self.documents, rows.size // len(places)), rows.dtype)
        states[places] = rows.reshape(len(places), -1)
        return states

    def entering(self, state: Array) -> Array:
        """States before all documents."""
        states = self.spread(state, self.first)
        states[self.first] *= self.goes_on
        return states.reshape(-1)


def _ends(borders: Array, starts: Tensor | None) -> _Ends | None:
    if starts is None or not starts.numel():
        return None
    rows = starts.shape[:-1].numel()
    first = np.searchsorted(borders, np.arange(rows) * starts.shape[-1])
    last = np.append(first[1:], len(borders) - 1) - 1
    return _Ends(len(borders) - 1, first, last, ~starts[..., :1].reshape(rows, 1).numpy())


def _forward_chunk(
    u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, state: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    call, signal, borders, sizes = _prepare((u, log_a, b, c, state), starts)
    y, before = torch.empty(u.shape, dtype=call.dtype), flat(state, call.dtype)
    if ends := _ends(borders, starts):
        before = ends.entering(before)
    after = np.empty_like(before)
    arguments = (signal, flat(y, call.dtype), call.packed, before, after, borders, *sizes)
    tasks = (len(borders) - 1) * call.blocks
    fan_out(forward, arguments, tasks, u.numel() * call.modes * FORWARD)
    if ends:
        after = after.reshape(ends.documents, -1)[ends.last]
    return y.to(u.dtype), *like((after,), (state,))


def _gradients(
    grad: Tensor,
    grad_after: Tensor | None,
    inputs: Sequence[Tensor],
    starts: Tensor | None = None,
) -> list[Array]:
    call, signal, borders, sizes = _prepare(inputs, starts)
    rows, longest = len(borders) - 1, int(np.diff(borders).max(initial=0))
    du, pieces = np.empty_like(signal), max(1, min(rows, ROW_PIECES))
    packed = call.empty_gradients(pieces)
    before = end = start = None
    ends = _ends(borders, starts)
    if grad_after is not None:
        end, before = flat(grad_after, call.dtype), flat(inputs[4], call.dtype)
        if ends:
            end, before = ends.spread(end, ends.last).reshape(-1), ends.entering(before)
        start = np.empty_like(before)
    signals = (flat(grad, call.dtype), end, signal, du)
    places = rows, borders, longest
    arguments = (*signals, call.packed, before, start, packed, *places, *sizes, pieces)
    fan_out(backward, arguments, pieces * call.blocks, signal.size * call.modes * BACKWARD)
    found = [du, *call.unpack(packed, pieces)]
    if start is not None and ends:
        start = start.reshape(ends.documents, -1)[ends.first] * ends.goes_on
    return found if start is None else [*found, start]


def _backward(
    grad: Tensor, u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = (u, log_a, b, c)
    return like(_gradients(grad, None, inputs, starts), inputs)


def _backward_chunk(
    grad: Tensor,
    grad_after: Tensor,
    u: Tensor,
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (u, log_a, b, c, state)
    return like(_gradients(grad, grad_after, inputs, starts), inputs)


_whole = define_kernel_op(
    "diagonal_ssm_kernel",
    _forward,
    _backward,
    lambda u, *_: empty_like(u)[0],
    lambda _grad, *inputs: empty_like(*inputs[:4]),
)
_chunk = define_kernel_op(
    "diagonal_ssm_chunk_kernel",
    _forward_chunk,
    _backward_chunk,
    lambda *inputs: empty_like(inputs[0], inputs[4]),
    lambda _grad, _after, *inputs: empty_like(*inputs[:5]),
)
