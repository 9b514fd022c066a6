"""The core of H3 in one pass over its signals, in kernels compiled by numba for the CPU."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.convolution import slide
from stateline.ops.diagonal_ssm.impulse_response import impulse_response
from stateline.ops.diagonal_ssm.numba_backend import responds_briefly
from stateline.ops.joined import side_by_side
from stateline.ops.numba_kernels import gated, tensors
from stateline.ops.numba_kernels.h3 import backward, forward
from stateline.ops.numba_kernels.in_place import Changing, h3_advance, rows_of, transitions
from stateline.ops.numba_kernels.parameters import (
    ROW_PIECES,
    Array,
    Coefficients,
    pack_taps,
    unpack_taps,
)
from stateline.ops.numba_kernels.short import TOGETHER
from stateline.ops.numba_kernels.steps import h3_step
from stateline.ops.numba_kernels.tensors import (
    array,
    define_kernel_op,
    empty_like,
    flat,
    like,
    strided,
)
from stateline.ops.numba_kernels.threads import fan_out
from stateline.ops.numba_kernels.vector import LANES
from stateline.ops.stepping import Stepper
from stateline.ops.thresholds import threshold

INPUTS = 8
"""Inputs before the states."""


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    if function == "h3_core_stepper":
        return tensors.can_use(*inputs)
    q, taps, b, c = inputs[0], inputs[3], inputs[5], inputs[6]
    if function == "h3_core_step":
        return tensors.can_step(*inputs)
    if len(b) != q.shape[-1] or len(c) != len(b):
        return "the numba kernel takes heads of one channel and one output"
    if taps.shape[1] > threshold("short_conv.numba_taps"):
        return "by FFT, a filter with so many taps is faster"
    return tensors.can_use(*inputs)


def h3_core(
    q: Tensor, k: Tensor, v: Tensor, taps: Tensor, log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor
) -> Tensor:
    """All in one pass, from zero states."""
    length = q.shape[1]
    if responds_briefly(q[:, : (length + 1) // 2], b):  # the recurrence would run three times
        response = impulse_response(log_a, b, c, length)
        response = torch.cat([response[:, :1] + skip[:, None], response[:, 1:]], dim=1)
        return _short(q, k, v, taps[:, :length], response)
    return _whole(q, k, v, taps, log_a, b, c, skip)


def h3_core_chunk(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    taps: Tensor,
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    past: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same from states."""
    y, after = _chunk(q, k, v, taps, log_a, b, c, skip, past, state)
    return y, slide(past, k), after


def h3_core_step(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    past: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token."""
    inputs = (q, k, v, weights, log_a, b, c, skip, past, state)
    dtype, rows, outputs = tensors.working_dtype(*inputs), len(q), len(c) // len(b)
    y = torch.empty((rows, outputs * q.shape[1]), dtype=dtype)
    before, after = torch.empty(past.shape, dtype=dtype), torch.empty(state.shape, dtype=dtype)
    signals = (array(x, dtype) for x in (q, k, v, weights))
    vectors = (array(x, dtype).reshape(len(x), -1) for x in (log_a, b, c))
    pasts = (array(x, dtype) for x in (past, before))
    states = (array(x, dtype).reshape(*x.shape[:4], -1) for x in (state, after))
    arguments = (*signals, *vectors, array(skip, dtype), *pasts, *states, array(y, dtype))
    fan_out(h3_step, arguments, len(b), (state.numel() + past.numel()) / 2)
    return y.to(q.dtype), before.to(past.dtype), after.to(state.dtype)


def h3_core_stepper(weights: Tensor, log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Stepper:
    """The same for many tokens, on states that change in place."""
    dtype = tensors.working_dtype(weights, log_a, b, c, skip)
    modes = transitions(log_a, dtype)
    constants = (array(weights, dtype), modes, *rows_of(dtype, b, c), array(skip, dtype))
    heads, outputs = len(b), len(c) // len(b)

    def step(q: Tensor, k: Tensor, v: Tensor, past: Tensor, state: Tensor) -> Tensor:
        y = torch.empty((len(q), outputs * q.shape[1]), dtype=dtype)
        work = (state.numel() + past.numel()) / 2
        with Changing(dtype, past, state) as (keys, x):
            signals = array(q, dtype), array(k, dtype), array(v, dtype)
            places = keys, x.reshape(*x.shape[:4], -1), y.numpy()
            fan_out(h3_advance, (*signals, *constants, *places), heads, work)
        return y.to(q.dtype)

    return step


class _Call(Coefficients):
    """Arrays and sizes of one call of the kernels."""

    def __init__(self, *inputs: Tensor) -> None:
        q, k, v, taps, log_a, b, c, skip = inputs[:INPUTS]
        dtype = tensors.working_dtype(*inputs)
        super().__init__(log_a, b, c, dtype, fold=len(inputs) == INPUTS)
        signals, stride = _signals(dtype, q, k, v)
        padded = flat(F.pad(skip.detach(), (0, -len(skip) % LANES)), dtype)
        self.states: list[Any] = [flat(x, dtype) for x in inputs[INPUTS:]] or [None, None]
        self.arrays = (*signals, pack_taps(taps, dtype), self.packed, padded, *self.states)
        self.batch, self.count = len(q), taps.shape[1]
        self.sizes = q.shape[1], self.channels, self.modes, stride


def _run(*inputs: Tensor) -> list[Tensor]:
    """Outputs, and the state after them if there are states."""
    call = _Call(*inputs)
    found = [torch.empty(x.shape, dtype=call.dtype) for x in (inputs[0], *inputs[INPUTS + 1 :])]
    outputs: list[Any] = [flat(x, call.dtype) for x in found]
    outputs += [None] * (2 - len(outputs))
    work = found[0].numel() * (call.modes * 0.1 + call.count * 0.06)
    arguments = (*call.arrays, *outputs, call.count, *call.sizes)
    fan_out(forward, arguments, call.batch * call.blocks, work)
    return found


def _gradients(grad: Tensor, grad_after: Tensor | None, *inputs: Tensor) -> list[Any]:
    call = _Call(*inputs)
    kind, pieces = call.packed.dtype, max(1, min(call.batch, ROW_PIECES))
    signals, found, apart = zip(*side_by_side(call.dtype, *inputs[:3]), strict=True)
    states: list[Any] = [None if x is None else np.empty_like(x) for x in call.states]
    lanes, whole = pieces * call.blocks * LANES, -(-call.count // TOGETHER) * TOGETHER
    dtaps, dskip = np.empty(lanes * whole), np.empty(lanes, kind)
    packed = call.empty_gradients(pieces)
    grads = flat(grad, call.dtype), None if grad_after is None else flat(grad_after, call.dtype)
    arguments = (*grads, *call.arrays, *found, dtaps, packed, dskip, *states, call.count)
    sizes = (call.batch, *call.sizes, apart[0], pieces)
    work = inputs[0].numel() * (call.modes * 0.6 + call.count * 0.2)
    fan_out(backward, (*arguments, *sizes), pieces * call.blocks, work)
    dskip = dskip.reshape(pieces, -1).sum(0)[: call.channels]
    weights = unpack_taps(dtaps, pieces, inputs[3]), *call.unpack(packed, pieces), dskip
    return [*signals, *weights, *(states if grad_after is not None else [])]


def _signals(dtype: torch.dtype, *signals: Tensor) -> tuple[list[Array], int]:
    """Queries, keys and values as flat arrays, and the entries from token to token."""
    arrays, strides = zip(*(strided(x, dtype) for x in signals), strict=True)
    if len(set(strides)) > 1:
        return [flat(x, dtype) for x in signals], signals[0].shape[2]
    return list(arrays), strides[0]


def _forward_short(q: Tensor, k: Tensor, v: Tensor, taps: Tensor, response: Tensor) -> Tensor:
    dtype, (channels, count) = tensors.working_dtype(q, taps, response), taps.shape
    signals, stride = _signals(dtype, q, k, v)
    y = torch.empty(q.shape, dtype=dtype)
    arrays = *signals, pack_taps(taps, dtype), pack_taps(response, dtype), flat(y, dtype)
    tasks, work = len(q) * -(-channels // LANES), q.numel() * (count + q.shape[1]) / 16
    fan_out(gated.forward, (*arrays, count, q.shape[1], channels, stride), tasks, work)
    return y.to(q.dtype)


def _backward_short(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, taps: Tensor, response: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype, (channels, count) = tensors.working_dtype(q, taps, response), taps.shape
    signals, stride = _signals(dtype, q, k, v)
    filters = pack_taps(taps, dtype), pack_taps(response, dtype)
    gradients, found, apart = zip(*side_by_side(dtype, q, k, v), strict=True)
    pieces, length = max(1, min(len(q), ROW_PIECES)), q.shape[1]
    tasks = pieces * -(-channels // LANES)
    sums = [np.empty(tasks * LANES * (-(-n // TOGETHER) * TOGETHER)) for n in (count, length)]
    arrays = flat(grad, dtype), *signals, *filters, *found, *sums
    sizes = count, len(q), length, channels, stride, apart[0], pieces
    fan_out(gated.backward, (*arrays, *sizes), tasks, q.numel() * (count + length) / 5)
    weights = (unpack_taps(d, pieces, x) for d, x in zip(sums, (taps, response), strict=True))
    return like((*gradients, *weights), (q, k, v, taps, response))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, taps: Tensor, log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor
) -> Tensor:
    return _run(q, k, v, taps, log_a, b, c, skip)[0].to(q.dtype)


def _backward(  # noqa: PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    taps: Tensor,
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (q, k, v, taps, log_a, b, c, skip)
    return like(_gradients(grad, None, *inputs), inputs)


def _forward_chunk(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    taps: Tensor,
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    past: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    y, after = _run(q, k, v, taps, log_a, b, c, skip, past, state)
    return y.to(q.dtype), after.to(state.dtype)


def _backward_chunk(  # noqa: PLR0913
    grad: Tensor,
    grad_after: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    taps: Tensor,
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    past: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (q, k, v, taps, log_a, b, c, skip, past, state)
    return like(_gradients(grad, grad_after, *inputs), inputs)


_short = define_kernel_op(
    "h3_core_short_kernel",
    _forward_short,
    _backward_short,
    lambda q, *_: empty_like(q)[0],
    lambda _grad, *inputs: empty_like(*inputs),
)
_whole = define_kernel_op(
    "h3_core_kernel",
    _forward,
    _backward,
    lambda q, *_: empty_like(q)[0],
    lambda _grad, *inputs: empty_like(*inputs),
)
_chunk = define_kernel_op(
    "h3_core_chunk_kernel",
    _forward_chunk,
    _backward_chunk,
    lambda q, *others: empty_like(q, others[-1]),
    lambda _grad, _grad_after, *inputs: empty_like(*inputs),
)
