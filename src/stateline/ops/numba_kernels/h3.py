r"""H3 between its projections in one pass: y = q (diagonal SSM of (filter of k) v).

For heads of one channel. The signals q, k and v are thirds of one projection: flat arrays whose
tokens are ``stride`` entries apart. With ``state is None``, everything begins with zeros. The
backward pass goes through time twice: forward for the states at the beginning of blocks and the
gradient of q, and back for the rest.
"""

# mypy: ignore-errors

from stateline.ops.numba_kernels.blocks import (
    FLUSH,
    MODES,
    WIDE,
    flush,
    modes_in,
    modes_out,
    read_block,
    scratch,
    write_block,
)
from stateline.ops.numba_kernels.diagonal import BACK, GRADIENTS, PLANES, advance, retreat
from stateline.ops.numba_kernels.jit import kernel
from stateline.ops.numba_kernels.short import (
    TOGETHER,
    correlate,
    filter_block,
    keep_last,
    read_before,
)
from stateline.ops.numba_kernels.vector import LANES, align_stack, load, store, zeros

TIME = 64
"""Tokens of a block."""


@kernel
def _write(shifted, v, skip, pairs, out, rows):
    """Products of shifted keys and values, and what the skip connection takes of them."""
    for t in range(rows):
        pair = load(shifted, t * LANES, LANES) * load(v, t * LANES, LANES)
        store(pairs, t * LANES, pair)
        store(out, t * LANES, load(skip, 0, LANES) * pair)


@kernel
def _gate(out, q, rows):
    for t in range(rows):
        store(out, t * LANES, load(out, t * LANES, LANES) * load(q, t * LANES, LANES))


@kernel
def _buffers(like, count):
    """A block of keys with those before it, and blocks of rows."""
    keys, size = scratch((count - 1 + TIME + TOGETHER) * LANES, like), (TIME + TOGETHER) * LANES
    return keys, scratch(8 * size, like).reshape((8, size))


@kernel
def forward(
    q, k, v, taps, p, skip, past, state, y, after, count, length, channels, modes, stride,
    start, stop,
):  # fmt: skip
    """Tasks ``start`` to ``stop`` of (row, channel block)."""
    align_stack()
    blocks, groups = (channels + LANES - 1) // LANES, (modes + MODES - 1) // MODES
    x = scratch(groups * 2 * WIDE, q)
    keys, rows_of = _buffers(q, count)
    fresh, shifted, pairs, out = keys[(count - 1) * LANES :], rows_of[0], rows_of[1], rows_of[2]
    vb, qb = rows_of[3], rows_of[4]
    for task in range(start, stop):
        row, block = task // blocks, task % blocks
        channel, lanes = block * LANES, min(LANES, channels - block * LANES)
        where = (row * channels + channel) * modes * 2
        modes_in(x, 0, state, where, modes, lanes)
        read_before(
            keys, k, past, row, 0, count - 1, length, channels, stride, channel, lanes, count - 1
        )
        for first in range(0, length, TIME):
            rows, place = min(TIME, length - first), row * length + first
            read_block(fresh, k, place * stride + channel, stride, rows, lanes)
            read_block(vb, v, place * stride + channel, stride, rows, lanes)
            read_block(qb, q, place * stride + channel, stride, rows, lanes)
            reach = (first if past is None else count) + TOGETHER
            filter_block(
                shifted, keys, count - 1, -1, taps, count, channel, blocks * LANES, rows, reach
            )
            keep_last(keys, rows, count - 1)
            _write(shifted, vb, skip[channel:], pairs, out, rows)
            for m in range(groups):
                at = (block * groups + m) * PLANES * WIDE
                advance(pairs, out, rows, x, m * 2 * WIDE, p, at, state)
            _gate(out, qb, rows)
            write_block(y, place * channels + channel, channels, rows, lanes, out)
        if state is not None:
            modes_out(after, where, modes, lanes, x, 0)


@kernel
def _gates_back(gy, qb, pairs, skip, dskip, gated, dpairs, rows):
    """Gradients of the SSM's output, of its input through the skip connection, and of skip."""
    total = load(dskip, 0, LANES)
    for t in range(rows):
        g = load(gy, t * LANES, LANES) * load(qb, t * LANES, LANES)
        store(gated, t * LANES, g)
        store(dpairs, t * LANES, load(skip, 0, LANES) * g)
        total = total + g * load(pairs, t * LANES, LANES)
    store(dskip, 0, total)


@kernel
def backward(
    gy, gafter, q, k, v, taps, p, skip, past, state,
    dq, dk, dv, dtaps, dp, dskip, dpast, dstate,
    count, batch, length, channels, modes, stride, apart, pieces, start, stop,
):  # fmt: skip
    """Tasks of (piece of the rows, channel block), each with gradients of the coefficients.

    Tokens of dq, dk and dv are ``apart`` entries apart. Gradients of the taps are reversed and
    padded as in the backward pass of the short filter.
    """
    align_stack()
    blocks, groups = (channels + LANES - 1) // LANES, (modes + MODES - 1) // MODES
    size, steps = groups * 2 * WIDE, max(1, (length + TIME - 1) // TIME)
    whole = (count + TOGETHER - 1) // TOGETHER * TOGETHER
    kept, lam = scratch((steps + 1) * size, q), scratch(size, q)
    h = scratch(TIME * 2 * BACK, q)
    keys, rows_of = _buffers(q, whole)  # more keys than count before: they meet padded taps
    fresh, shifted, pairs, out = keys[(whole - 1) * LANES :], rows_of[0], rows_of[1], rows_of[2]
    vb, qb, gb, gated, dpairs = rows_of[3], rows_of[4], rows_of[5], rows_of[6], rows_of[7]
    later = scratch((TIME + count - 1 + TOGETHER) * LANES, q)  # gradients of shifted keys
    grad, dtap = scratch(groups * GRADIENTS * WIDE, q), scratch(whole * LANES, q)
    grad[:] = 0
    dtap[:] = 0
    for task in range(start, stop):
        piece, block = task // blocks, task % blocks
        channel, lanes = block * LANES, min(LANES, channels - block * LANES)
        padded, weight, lost = blocks * LANES, skip[channel:], dskip[task * LANES :]
        of_taps, of_p = task * whole * LANES, task * groups * GRADIENTS * WIDE
        at_p = block * groups * PLANES * WIDE
        dtaps[of_taps : of_taps + whole * LANES] = 0
        dp[of_p : of_p + groups * GRADIENTS * WIDE] = 0
        lost[:LANES] = 0
        done = 0  # blocks of time, of all rows
        for row in range(batch * piece // pieces, batch * (piece + 1) // pieces):
            where = (row * channels + channel) * modes * 2
            modes_in(kept, 0, state, where, modes, lanes)
            modes_in(lam, 0, gafter, where, modes, lanes)
            for back in range(2 * steps):  # forward through all blocks, and back through them
                n = min(back, 2 * steps - 1 - back)
                first = n * TIME
                rows, place = min(TIME, length - first), row * length + first
                read_before(
                    keys, k, past, row, first, whole - 1, length, channels, stride, channel, lanes,
                    count - 1,
                )  # fmt: skip
                read_block(fresh, k, place * stride + channel, stride, rows, lanes)
                read_block(vb, v, place * stride + channel, stride, rows, lanes)
                read_block(gb, gy, place * channels + channel, channels, rows, lanes)
                before = first if past is None else whole  # keys that are not zero
                filter_block(
                    shifted, keys, whole - 1, -1, taps, count, channel, padded, rows,
                    before + TOGETHER,
                )  # fmt: skip
                _write(shifted, vb, weight, pairs, out, rows)
                here = n * size
                if back < steps:
                    kept[here + size : here + 2 * size] = kept[here : here + size]
                    for m in range(groups):
                        at, there = at_p + m * PLANES * WIDE, here + size + m * 2 * WIDE
                        advance(pairs, out, rows, kept, there, p, at, state)
                    _gate(out, gb, rows)
                    write_block(dq, place * apart + channel, apart, rows, lanes, out)
                    continue
                read_block(qb, q, place * stride + channel, stride, rows, lanes)
                _gates_back(gb, qb, pairs, weight, lost, gated, dpairs, rows)
                retreat(
                    pairs, gated, dpairs, rows, kept, here, lam, 0, p, at_p, h, grad, 0, groups,
                    state,
                )  # fmt: skip
                if back == steps:
                    later[rows * LANES :] = 0
                else:  # rows are TIME here: move the gradients of later keys behind
                    for i in range((count - 1) * LANES - 1, -1, -1):
                        later[i + TIME * LANES] = later[i]
                for t in range(rows):
                    g, i = load(dpairs, t * LANES, LANES), t * LANES
                    store(later, i, g * load(vb, i, LANES))
                    store(out, i, g * load(shifted, i, LANES))
                write_block(dv, place * apart + channel, apart, rows, lanes, out)
                correlate(dtap, later, keys, whole, rows, whole - 1 - before)
                filter_block(out, later, 0, 1, taps, count, channel, padded, rows, length - first)
                write_block(dk, place * apart + channel, apart, rows, lanes, out)
                done += 1
                if done % FLUSH == 0:
                    flush(dtaps, of_taps, dtap, 0, whole * LANES)
                    flush(dp, of_p, grad, 0, groups * GRADIENTS * WIDE)
            if state is not None:
                modes_out(dstate, where, modes, lanes, lam, 0)
                # the gradients of the keys before: block by block of negative time
                for t in range(count - 1):
                    total = zeros(out, LANES)
                    for j in range(t + 1):
                        w = load(taps, (count - 1 - t + j) * padded + channel, LANES)
                        total = total + w * load(later, j * LANES, LANES)
                    store(out, 0, total)
                    place = (row * (count - 1) + t) * channels + channel
                    write_block(dpast, place, channels, 1, lanes, out)
        flush(dtaps, of_taps, dtap, 0, whole * LANES)
        flush(dp, of_p, grad, 0, groups * GRADIENTS * WIDE)
