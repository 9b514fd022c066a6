"""One token, with the state changed in place.

The kernels of :mod:`stateline.ops.numba_kernels.steps` write new states. Given one array for both
states, their loops would not be vectorised, because LLVM cannot exclude that the arrays overlap by
a part. Here every loop reads and writes the same entries of one array.
"""

# mypy: ignore-errors

import numpy as np
import torch
from torch import Tensor

from stateline.ops.numba_kernels.jit import kernel, summing_kernel
from stateline.ops.numba_kernels.steps import planes_of, read_modes, rounded_transition
from stateline.ops.numba_kernels.tensors import array
from stateline.ops.numba_kernels.vector import LANES, LOG2_E, entry, exp2, load, store


class Changing:
    """Arrays of states, whose changes reach the states; shapes and order of entries are kept.

    A context manager without a generator, for one is entered at every token of every layer.
    """

    __slots__ = ("held", "states")

    def __init__(self, dtype: torch.dtype, *states: Tensor) -> None:
        self.states = states
        self.held = [x.to(dtype).contiguous() for x in states]

    def __enter__(self) -> list[np.ndarray]:
        return [x.detach().numpy() for x in self.held]

    def __exit__(self, *_: object) -> None:
        for state, copy in zip(self.states, self.held, strict=True):
            if copy is not state:
                state.copy_(copy)
            elif not state.is_inference():
                torch.autograd.graph.increment_version(state)


def transitions(log_a: Tensor, dtype: torch.dtype) -> np.ndarray:
    """Planes (4, channel * mode) of the transitions; see ``rounded_transition``."""
    return rounded_transition(array(log_a, dtype), np.empty(0, array(log_a[:0], dtype).dtype))


def rows_of(dtype: torch.dtype, *vectors: Tensor) -> list[np.ndarray]:
    """Vectors (channel, mode, 2) as arrays (channel, 2 modes)."""
    return [array(x, dtype).reshape(len(x), -1) for x in vectors]


@kernel
def rotate_modes(x, ar, ai, er, ei, b, u):
    """Set x = a x + b u for the modes of one channel, as ``advance_modes`` does."""
    for n in range(len(ar)):
        xr, xi = x[2 * n], x[2 * n + 1]
        rest_r = er[n] * xr - ei[n] * xi + b[2 * n] * u
        rest_i = er[n] * xi + ei[n] * xr + b[2 * n + 1] * u
        x[2 * n] = ar[n] * xr - ai[n] * xi + rest_r
        x[2 * n + 1] = ar[n] * xi + ai[n] * xr + rest_i


@summing_kernel
def diagonal_advance(u, a, b, c, skip, x, y, start, stop):
    """Channels ``start`` to ``stop`` of states x (row, channel, 2 modes), outputs into y."""
    rows, channels = u.shape
    modes = b.shape[1] // 2
    for channel in range(start, stop):
        ar, ai, er, ei = planes_of(a, channel, modes)
        for row in range(rows):
            now = u[row, channel]
            rotate_modes(x[row, channel], ar, ai, er, ei, b[channel], now)
            for output in range(channel, c.shape[0], channels):
                y[row, output] = read_modes(c[output], x[row, channel]) + skip[output] * now


@summing_kernel
def h3_advance(q, k, v, weights, a, b, c, skip, past, x, y, start, stop):
    """Heads ``start`` to ``stop`` of the H3 core; arrays as for ``h3_step``."""
    heads, modes = b.shape[0], b.shape[1] // 2
    rows, width = q.shape[0], q.shape[1] // heads
    shifted, taps = np.empty(q.shape, q.dtype), weights.reshape(-1)
    for row in range(rows):
        inputs = past[row].reshape(-1)
        filter_advance_row(shifted[row], k[row], taps, inputs, start * width, stop * width)
    for head in range(start, stop):
        ar, ai, er, ei = planes_of(a, head, modes)
        for row in range(rows):
            for output in range(head, c.shape[0], heads):
                place = output // heads * q.shape[1] + head * width
                for j in range(width):
                    y[row, place + j] = 0
            for i in range(width):
                for j in range(width):
                    pair = shifted[row, head * width + i] * v[row, head * width + j]
                    own = x[row, i, j, head]
                    rotate_modes(own, ar, ai, er, ei, b[head], pair)
                    for output in range(head, c.shape[0], heads):
                        place = output // heads * q.shape[1] + head * width + j
                        read = read_modes(c[output], own) + skip[output] * pair
                        y[row, place] += q[row, head * width + i] * read


@summing_kernel
def filter_advance_row(y, u, weights, past, start, stop):
    """Filter channels ``start`` to ``stop`` of one row; the oldest input leaves ``past``.

    Weights and past are flat; that of the oldest input comes first.
    """
    channels = len(u)
    held = len(past) // channels * channels
    vectors = start + (stop - start) // LANES * LANES
    for i in range(start, vectors, LANES):
        newest = load(u, i, LANES)
        total = load(weights, held + i, LANES) * newest
        for at in range(i, held, channels):
            total = total + load(weights, at, LANES) * load(past, at, LANES)
        for at in range(i, held - channels, channels):
            store(past, at, load(past, at + channels, LANES))
        if held:
            store(past, held - channels + i, newest)
        store(y, i, total)
    for i in range(vectors, stop):
        total = entry(weights, held + i) * u[i]
        for at in range(i, held, channels):
            total += entry(weights, at) * entry(past, at)
            past[at] = entry(past, at + channels) if at + channels < held else u[i]
        y[i] = total


@summing_kernel
def filter_advance(u, weights, past, y, start, stop):
    """Rows ``start`` to ``stop`` of a filter whose taps lie with that of the oldest input first."""
    taps = weights.reshape(-1)
    for row in range(start, stop):
        filter_advance_row(y[row], u[row], taps, past[row].reshape(-1), 0, u.shape[1])


@summing_kernel
def selective_advance(u, dt, a, b, c, h, y, start, stop):
    """Rows ``start`` to ``stop`` of a selective scan; b and c are (row, group, d_state)."""
    channels, d_state = a.shape
    each, log2e = channels // b.shape[1], u.dtype.type(LOG2_E)
    for row in range(start, stop):
        for channel in range(channels):
            g, total = channel // each, u.dtype.type(0)
            rate, x = log2e * dt[row, channel], dt[row, channel] * u[row, channel]
            for n in range(d_state):
                new = exp2(rate * a[channel, n]) * h[row, channel, n] + x * b[row, g, n]
                h[row, channel, n] = new
                total += c[row, g, n] * new
            y[row, channel] = total
