r"""Causal filters of up to a few hundred taps: y_t = sum_k w_k u_{t-k}.

Eight tokens, or eight taps, go together: a wide vector holds ``MODES`` neighbours in time. Taps are
packed as (tap, channels), the channels padded to a multiple of ``LANES``.
"""

# mypy: ignore-errors

from stateline.ops.numba_common.blocks import (
    FLUSH,
    MODES,
    WIDE,
    flush,
    read_block,
    scratch,
    write_block,
)
from stateline.ops.numba_common.jit import kernel
from stateline.ops.numba_common.vector import LANES, align_stack, load, store, zeros

TIME = 128
"""Tokens of a block."""

TOGETHER = 2 * MODES
"""Tokens or taps computed together. Buffers have this many padding rows with ignored values."""


@kernel
def filter_block(out, signal, first, direction, taps, count, where, channels, rows, reach):
    """out_t = sum_k taps_k signal_{first + t + direction k} for one block of channels.

    Only the first ``reach - direction * t`` taps meet signals that are not zero.
    """
    align_stack()
    for t in range(0, rows, TOGETHER):
        early = zeros(out, WIDE)
        late = zeros(out, WIDE)
        for k in range(min(count, reach - direction * t)):
            w = load(taps, k * channels + where, LANES)
            place = (first + t + direction * k) * LANES
            early = early + w * load(signal, place, WIDE)
            late = late + w * load(signal, place + WIDE, WIDE)
        store(out, t * LANES, early)
        store(out, t * LANES + WIDE, late)


@kernel
def correlate(grad, out_grad, signal, count, rows, silent):
    """grad_j += sum_t out_grad_t signal_{t + j} for j < count, a multiple of TOGETHER.

    The first ``silent`` rows of the signal are zero.
    """
    align_stack()
    for j in range(0, count, TOGETHER):
        early, late = load(grad, j * LANES, WIDE), load(grad, j * LANES + WIDE, WIDE)
        for t in range(max(0, silent - j - TOGETHER + 1), rows):
            g, place = load(out_grad, t * LANES, LANES), (t + j) * LANES
            early = early + g * load(signal, place, WIDE)
            late = late + g * load(signal, place + WIDE, WIDE)
        store(grad, j * LANES, early)
        store(grad, j * LANES + WIDE, late)


@kernel
def keep_last(buffer, rows, count):
    """Move the last ``count`` of ``rows + count`` rows to the front."""
    for i in range(count * LANES):
        buffer[i] = buffer[i + rows * LANES]


@kernel
def forward(u, taps, y, count, borders, channels, stride, start, stop):
    """Tasks ``start`` to ``stop`` of (row, channel block); tokens are ``stride`` entries apart.

    Row n has the tokens ``borders[n]`` to ``borders[n + 1]``.
    """
    align_stack()
    blocks = (channels + LANES - 1) // LANES
    buffer = scratch((count - 1 + TIME + TOGETHER) * LANES, u)
    fresh, out = buffer[(count - 1) * LANES :], scratch((TIME + TOGETHER) * LANES, u)
    for task in range(start, stop):
        row, channel = task // blocks, task % blocks * LANES
        lanes = min(LANES, channels - channel)
        begin, length = borders[row], borders[row + 1] - borders[row]
        buffer[: (count - 1) * LANES] = 0
        for first in range(0, length, TIME):
            rows = min(TIME, length - first)
            place = begin + first
            read_block(fresh, u, place * stride + channel, stride, rows, lanes)
            filter_block(
                out, buffer, count - 1, -1, taps, count, channel, blocks * LANES, rows,
                first + TOGETHER,
            )  # fmt: skip
            keep_last(buffer, rows, count - 1)
            write_block(y, place * channels + channel, channels, rows, lanes, out)


@kernel
def backward(gy, u, taps, du, dtaps, count, batch, borders, channels, stride, pieces, start, stop):
    """Tasks of (piece of the rows, channel block); each has taps' gradients (tap, LANES).

    The taps' gradients are in reversed order, and padded in front to a multiple of ``TOGETHER``.
    """
    align_stack()
    blocks, whole = (channels + LANES - 1) // LANES, (count + TOGETHER - 1) // TOGETHER * TOGETHER
    buffer = scratch((whole - 1 + TIME + TOGETHER) * LANES, u)  # inputs after earlier ones
    grads = scratch((TIME + count - 1 + TOGETHER) * LANES, u)  # gradients, then later ones
    fresh, out = buffer[(whole - 1) * LANES :], scratch((TIME + TOGETHER) * LANES, u)
    grad = scratch(whole * LANES, u)
    grad[:] = 0
    for task in range(start, stop):
        piece, channel = task // blocks, task % blocks * LANES
        lanes, at = min(LANES, channels - channel), task * whole * LANES
        dtaps[at : at + whole * LANES] = 0
        done = 0  # blocks of time, of all rows
        for row in range(batch * piece // pieces, batch * (piece + 1) // pieces):
            begin, length = borders[row], borders[row + 1] - borders[row]
            buffer[: (whole - 1) * LANES] = 0
            for first in range(0, length, TIME):
                rows, place = min(TIME, length - first), begin + first
                more = min(TIME + count - 1, length - first)
                read_block(grads, gy, place * channels + channel, channels, more, lanes)
                grads[more * LANES :] = 0
                read_block(fresh, u, place * stride + channel, stride, rows, lanes)
                filter_block(out, grads, 0, 1, taps, count, channel, blocks * LANES, rows, more)
                write_block(du, place * channels + channel, channels, rows, lanes, out)
                correlate(grad, grads, buffer, whole, rows, whole - 1 - first)
                keep_last(buffer, rows, whole - 1)
                done += 1
                if done % FLUSH == 0:
                    flush(dtaps, at, grad, 0, whole * LANES)
        flush(dtaps, at, grad, 0, whole * LANES)
