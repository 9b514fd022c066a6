r"""Selective scan: h_t = exp(dt_t a) h_{t-1} + dt_t u_t b_t, y_t = c_t . h_t.

Signals u, dt and y are flat (row, time, channel); b and c are (row, time, group, states), with the
states padded to a multiple of ``MODES``; a and the states h are (channel, d_state) as they come.
Channel blocks do not cross the borders of groups. The backward pass keeps the states at the
beginning of blocks of time, and computes decays and states inside again. Each decay is multiplied
by the factor of its token in ``stays`` (row, time), zero where a document begins; ``None``: ones.
"""

# mypy: ignore-errors

import math

import numpy as np

from stateline.ops.numba_common.blocks import (
    FLUSH,
    MODES,
    WIDE,
    flush,
    read_block,
    scratch,
    states_in,
    states_out,
    write_block,
)
from stateline.ops.numba_common.jit import kernel, summing_kernel
from stateline.ops.numba_common.vector import (
    LANES,
    LOG2_E,
    align_stack,
    entry,
    exp2,
    fold,
    load,
    load_each,
    store,
    sum_channels,
)

TIME = 64
"""Tokens of a block."""

SPAN = 4
"""Neighbouring channel blocks that are processed together, since memory access is then faster."""

LN2 = math.log(2)


@kernel
def _split(task, blocks, in_group, groups):
    """Row, group, first channel and number of channels of a task."""
    row, block = task // blocks, task % blocks
    in_blocks = blocks // groups
    group, inside = block // in_blocks, block % in_blocks * LANES
    return row, group, group * in_group + inside, min(LANES, in_group - inside)


@kernel
def _inputs(tb, ub, xb, dt, u, place, channels, rows, lanes):
    """Blocks of dt, u, and their product."""
    read_block(tb, dt, place, channels, rows, lanes)
    read_block(ub, u, place, channels, rows, lanes)
    for t in range(rows):
        store(xb, t * LANES, load(tb, t * LANES, LANES) * load(ub, t * LANES, LANES))


@kernel
def _decay(rate, tb, t, stays, token):
    """Decays of a group of states at token t of a block, whose first token is ``token``."""
    decay = exp2(rate * load(tb, t * LANES, LANES))
    return decay if stays is None else decay * entry(stays, token + t)


@kernel
def _advance(tb, xb, yb, rows, h, at, a, k, b, c, place, stride, stays, token, hs, es):
    """A block of tokens through one group of states; yb takes their outputs.

    The states (before the first token, and after each) go into hs, and the decays into es. What is
    ``None`` is not computed.
    """
    align_stack()
    state, rate = load(h, at, WIDE), load(a, k, WIDE)
    if hs is not None:
        store(hs, 0, state)
    for t in range(rows):
        decay = _decay(rate, tb, t, stays, token)
        written = load_each(b, place + t * stride, MODES) * load(xb, t * LANES, LANES)
        state = decay * state + written
        if yb is not None:
            read = fold(load_each(c, place + t * stride, MODES) * state)
            store(yb, t * LANES, load(yb, t * LANES, LANES) + read)
        if hs is not None:
            store(es, t * WIDE, decay)
            store(hs, (t + 1) * WIDE, state)
    store(h, at, state)


@kernel
def forward(
    u, dt, b, c, a, state, stays, y, after, length, channels, d_state, groups, start, stop
):  # fmt: skip
    """Tasks ``start`` to ``stop`` of (row, channel block)."""
    align_stack()
    in_group, wide_state = channels // groups, (d_state + MODES - 1) // MODES * MODES
    blocks, size = (in_group + LANES - 1) // LANES * groups, wide_state * LANES
    h, rates = scratch(SPAN * size, u), scratch(SPAN * size, u)
    tb, ub = scratch(TIME * LANES, u), scratch(TIME * LANES, u)
    xb, yb = scratch(TIME * LANES, u), scratch(TIME * LANES, u)
    stride, task = groups * wide_state, start
    while task < stop:
        end = min(task + SPAN, stop, (task // blocks + 1) * blocks)
        for each in range(task, end):
            row, group, channel, lanes = _split(each, blocks, in_group, groups)
            at, where = (each - task) * size, (row * channels + channel) * d_state
            states_in(h, at, state, where, d_state, lanes, 1)
            states_in(rates, at, a, channel * d_state, d_state, lanes, 1)
            rates[at : at + size] *= u.dtype.type(LOG2_E)
        for first in range(0, length, TIME):
            rows = min(TIME, length - first)
            for each in range(task, end):
                row, group, channel, lanes = _split(each, blocks, in_group, groups)
                place = (row * length + first) * channels + channel
                _inputs(tb, ub, xb, dt, u, place, channels, rows, lanes)
                yb[:] = 0
                for m in range(0, wide_state, MODES):
                    at = (each - task) * size + m * LANES
                    there = ((row * length + first) * groups + group) * wide_state + m
                    token = row * length + first
                    _advance(
                        tb, xb, yb, rows, h, at, rates, at, b, c, there, stride, stays, token,
                        None, None,
                    )  # fmt: skip
                write_block(y, place, channels, rows, lanes, yb)
        for each in range(task, end):
            row, group, channel, lanes = _split(each, blocks, in_group, groups)
            where = (row * channels + channel) * d_state
            states_out(after, where, d_state, lanes, 1, h, (each - task) * size)
        task = end


@kernel
def _adjoint(gb, tb, xb, dxb, dtb, rows, lam, at, a, k, da, b, c, place, stride, hs, es, db, dc, q):
    """Gradients of the states back through a block; lam: gradient of the state before it."""
    align_stack()
    adjoint, rate, grad = load(lam, at, WIDE), load(a, k, WIDE), load(da, at, WIDE)
    for t in range(rows - 1, -1, -1):
        g, here, there = load(gb, t * LANES, LANES), place + t * stride, q + t * stride
        adjoint = load_each(c, here, MODES) * g + adjoint
        of_c = sum_channels(g * load(hs, (t + 1) * WIDE, WIDE))
        store(dc, there, load(dc, there, MODES) + of_c)
        of_b = sum_channels(adjoint * load(xb, t * LANES, LANES))
        store(db, there, load(db, there, MODES) + of_b)
        of_x = fold(adjoint * load_each(b, here, MODES))
        store(dxb, t * LANES, load(dxb, t * LANES, LANES) + of_x)
        adjoint = adjoint * load(es, t * WIDE, WIDE)
        through = adjoint * load(hs, t * WIDE, WIDE)  # the gradient of the logarithm of the decay
        grad = through * load(tb, t * LANES, LANES) + grad
        store(dtb, t * LANES, load(dtb, t * LANES, LANES) + fold(through * rate))
    store(lam, at, adjoint)
    store(da, at, grad)


@kernel
def _outputs(ub, tb, dxb, dtb, rows):
    """Replace the gradients of dt u and of dt times rates by the gradients of u and dt."""
    for t in range(rows):
        dx = load(dxb, t * LANES, LANES)
        dt = dx * load(ub, t * LANES, LANES) + LN2 * load(dtb, t * LANES, LANES)
        store(dtb, t * LANES, dt)
        store(dxb, t * LANES, dx * load(tb, t * LANES, LANES))


@kernel
def backward(
    gy, gafter, u, dt, b, c, a, state, stays, du, ddt, da, db, dc, dstate,
    batch, length, channels, d_state, groups, pieces, start, stop,
):  # fmt: skip
    """Tasks of (row, piece of the channel blocks).

    The gradients of b and c are (piece, row, time, group, states), and the gradient of a is (row,
    channel, state). The caller sums them over the first axis.
    """
    align_stack()
    in_group, wide_state = channels // groups, (d_state + MODES - 1) // MODES * MODES
    blocks, size = (in_group + LANES - 1) // LANES * groups, wide_state * LANES
    most, count = (blocks + pieces - 1) // pieces, max(1, (length + TIME - 1) // TIME)
    kept = scratch(most * count * size, u)
    rates, grad = scratch(most * size, u), scratch(most * size, u)
    grad[:] = 0
    lam, total = scratch(most * size, u), np.zeros(most * size)
    tb, ub = scratch(TIME * LANES, u), scratch(TIME * LANES, u)
    xb, gb = scratch(TIME * LANES, u), scratch(TIME * LANES, u)
    dxb, dtb = scratch(TIME * LANES, u), scratch(TIME * LANES, u)
    hs, es = scratch((TIME + 1) * WIDE, u), scratch(TIME * WIDE, u)
    stride = groups * wide_state
    for task in range(start, stop):
        row, piece = task // pieces, task % pieces
        begin, end = blocks * piece // pieces, blocks * (piece + 1) // pieces
        total[:] = 0
        for block in range(begin, end):
            _, group, channel, lanes = _split(block, blocks, in_group, groups)
            at, where = (block - begin) * size, (row * channels + channel) * d_state
            states_in(kept, at * count, state, where, d_state, lanes, 1)
            states_in(lam, at, gafter, where, d_state, lanes, 1)
            states_in(rates, at, a, channel * d_state, d_state, lanes, 1)
            rates[at : at + size] *= u.dtype.type(LOG2_E)
        for n in range(1, count):
            for block in range(begin, end):
                _, group, channel, lanes = _split(block, blocks, in_group, groups)
                place = (row * length + (n - 1) * TIME) * channels + channel
                _inputs(tb, ub, xb, dt, u, place, channels, TIME, lanes)
                here = ((block - begin) * count + n) * size
                kept[here : here + size] = kept[here - size : here]
                for m in range(0, wide_state, MODES):
                    k = (block - begin) * size + m * LANES
                    at = ((row * length + (n - 1) * TIME) * groups + group) * wide_state + m
                    _advance(
                        tb, xb, None, TIME, kept, here + m * LANES, rates, k, b, c, at, stride,
                        stays, row * length + (n - 1) * TIME, None, None,
                    )  # fmt: skip
        for n in range(count - 1, -1, -1):
            rows = min(TIME, length - n * TIME)
            for block in range(begin, end):
                _, group, channel, lanes = _split(block, blocks, in_group, groups)
                place = (row * length + n * TIME) * channels + channel
                _inputs(tb, ub, xb, dt, u, place, channels, rows, lanes)
                read_block(gb, gy, place, channels, rows, lanes)
                dxb[:] = 0
                dtb[:] = 0
                for m in range(0, wide_state, MODES):
                    k = (block - begin) * size + m * LANES
                    here = ((block - begin) * count + n) * size + m * LANES
                    at = ((row * length + n * TIME) * groups + group) * wide_state + m
                    q = (((piece * batch + row) * length + n * TIME) * groups + group) * wide_state
                    token = row * length + n * TIME
                    _advance(
                        tb, xb, None, rows, kept, here, rates, k, b, c, at, stride, stays, token,
                        hs, es,
                    )  # fmt: skip
                    _adjoint(
                        gb, tb, xb, dxb, dtb, rows, lam, k, rates, k, grad, b, c, at, stride,
                        hs, es, db, dc, q + m,
                    )  # fmt: skip
                _outputs(ub, tb, dxb, dtb, rows)
                write_block(du, place, channels, rows, lanes, dxb)
                write_block(ddt, place, channels, rows, lanes, dtb)
            if n % FLUSH == 0:
                flush(total, 0, grad, 0, total.size)
        for block in range(begin, end):
            _, group, channel, lanes = _split(block, blocks, in_group, groups)
            at, where = (block - begin) * size, (row * channels + channel) * d_state
            states_out(dstate, where, d_state, lanes, 1, lam, at)
            states_out(da, where, d_state, lanes, 1, total, at)


@summing_kernel
def selective_step(u, dt, b, c, a, h, y, start, stop):
    """One step of rows ``start`` to ``stop``: states h (row, channel, d_state) change in place."""
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
