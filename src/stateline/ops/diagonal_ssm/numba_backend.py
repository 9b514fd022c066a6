"""Diagonal state space model by its recurrence, in kernels compiled by numba for the CPU."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stateline.ops.diagonal_ssm import DiagonalWeights
from stateline.ops.diagonal_ssm.numba_kernel import (
    GRADIENTS,
    PLANES,
    backward,
    forward,
    pack,
    unpack,
)
from stateline.ops.diagonal_ssm.step_kernel import diagonal_advance, rows_of, transitions
from stateline.ops.diagonal_ssm.transition_kernel import transition
from stateline.ops.dispatch import wants_gradient
from stateline.ops.kernel_op import KernelOp
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.blocks import MODES, WIDE
from stateline.ops.numba_common.launch import (
    Changing,
    array,
    borders_of,
    fan_out,
    flat,
    of_token,
    output,
)
from stateline.ops.numba_common.vector import LANES
from stateline.ops.stepping import Stepper

FORWARD, BACKWARD, STEP = 0.1, 0.5, 0.5
"""Nanoseconds per position and mode, to decide whether to use threads."""

ROW_PIECES = 8
"""Parts of the batch that are summed apart; fixed, so threads do not change the rounding."""

Array = NDArray[Any]


LONG = 512, 2048
"""On SSE, the recurrence is faster than the FFT from this number of tokens: without and with
gradients."""

can_use = launch.can_run


def gains(function: str, *inputs: Any) -> bool:
    """Whether a call is faster here: with vectors of SSE, only long ones."""
    if LANES > 4 or function != "diagonal_ssm":
        return True
    return inputs[0].shape[-2] >= LONG[wants_gradient(*inputs)]


def diagonal_ssm(
    u: Tensor, weights: DiagonalWeights, state: Tensor | None, starts: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Run the recurrence; several readouts of a channel run side by side, as channels."""
    (log_a, b, c), channels = weights, u.shape[-1]
    readouts = len(c) // channels
    if (
        state is not None
        and starts is None
        and u.shape[-2] == 1
        and not can_use("diagonal_ssm_step", u, *weights, state)
    ):
        y, after = diagonal_ssm_step(u[..., 0, :], weights, state)  # rounds better
        return y[..., None, :], after
    if readouts > 1:
        u = u.repeat(*[1] * (u.ndim - 1), readouts)
        log_a = log_a.repeat(readouts, 1, 1) if len(log_a) > 1 else log_a
        weights = DiagonalWeights(log_a, b.repeat(readouts, 1, 1), c)
        state = None if state is None else state.repeat(*[1] * (state.ndim - 3), readouts, 1, 1)
    y, after = _whole(u, weights, state, starts)
    if state is None:
        return y, None
    # a view would keep the memory of all readouts
    return y, after if readouts == 1 else after[..., :channels, :, :].clone()


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


def _ends(
    shape: torch.Size, borders: Array, starts: Tensor | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each document: the row whose state it continues, the row whose state it leaves; or -1."""
    length = shape[-1]
    if starts is None or not length:
        rows = np.arange(len(borders) - 1)
        return rows, rows
    rows, places = np.divmod(borders[:-1], length)
    goes_on = (places == 0) & ~starts.reshape(-1, length)[rows, 0].numpy()
    return np.where(goes_on, rows, -1), np.where(borders[1:] % length == 0, rows, -1)


class _Call:
    """A call in the layout of the kernels: coefficients, signal, states, and documents.

    Without a state, b is a factor of the output vector.
    """

    def __init__(
        self, u: Tensor, weights: DiagonalWeights, state: Tensor | None, starts: Tensor | None
    ) -> None:
        self.dtype = launch.working_dtype(u, *weights, state)
        self.sizes = channels, modes = weights.b.shape[:2]
        self.log_a, self.b, self.c = [flat(x, self.dtype) for x in weights]
        self.a, self.fold = np.empty(self.log_a.size), state is None
        transition(self.log_a, self.a)
        self.blocks = -(-channels // LANES)
        self.size = self.blocks * -(-modes // MODES) * WIDE
        self.packed = np.empty(self.size * PLANES, self.b.dtype)
        pack(self.packed, self.a, self.b, self.c, *self.sizes, self.fold)
        self.signal, self.borders = flat(u, self.dtype), borders_of(u.shape[:-1], starts)
        self.documents = self.borders, *_ends(u.shape[:-1], self.borders, starts)
        self.state = None if state is None else flat(state, self.dtype)
        self.rows, self.work = len(self.borders) - 1, self.signal.size * modes

    def unpack(self, gradients: Array) -> tuple[Array, ...]:
        """Gradients of the weights, from the coefficients' gradients in each piece of the rows."""
        found = [np.empty_like(x) for x in (self.log_a, self.b, self.c)]
        total = gradients.reshape(-1, self.size * GRADIENTS).sum(0)
        unpack(total, self.a, self.b, self.c, *found, *self.sizes, self.fold)
        return tuple(found)


def _forward(
    u: Tensor, weights: DiagonalWeights, state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs, and the state after them; an empty tensor if no state is given."""
    call = _Call(u, weights, state, starts)
    y = torch.empty(u.shape, dtype=call.dtype, device="cpu")
    after = None if call.state is None else np.empty_like(call.state)
    states = call.packed, call.state, after
    arguments = call.signal, flat(y, call.dtype), *states, *call.documents, *call.sizes
    fan_out(forward, arguments, call.rows * call.blocks, call.work * FORWARD)
    if state is None or after is None:
        return y.to(u.dtype), y.new_empty(0)
    return y.to(u.dtype), torch.from_numpy(after).view(state.shape).to(state.dtype)


def _backward(
    grad: Tensor,
    grad_after: Tensor,
    u: Tensor,
    weights: DiagonalWeights,
    state: Tensor | None,
    starts: Tensor | None,
) -> Any:
    call = _Call(u, weights, state, starts)
    du, pieces = np.empty_like(call.signal), max(1, min(call.rows, ROW_PIECES))
    packed = np.empty(pieces * call.size * GRADIENTS)  # float64, for they are sums
    end = before = None
    if call.state is not None:
        end, before = flat(grad_after, call.dtype), np.zeros_like(call.state)
    signals = flat(grad, call.dtype), end, call.signal, du
    places = call.rows, *call.documents, np.diff(call.borders).max(initial=0)
    arguments = (*signals, call.packed, call.state, before, packed, *places, *call.sizes, pieces)
    fan_out(backward, arguments, pieces * call.blocks, call.work * BACKWARD)
    return du, call.unpack(packed), before


def _fake(u: Tensor, _: DiagonalWeights, state: Tensor | None, *__: Any) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), u.new_empty(0) if state is None else state.new_empty(state.shape)


_whole = KernelOp("diagonal_ssm_kernel", _forward, _backward, _fake)
