"""Delta rule by its recurrence, and its adjoint, which is a recurrence of the same kind.

A task is a block of lanes of one head: its part of the state (row, LANES) goes through time in the
fastest cache. Rows of the state are ``MODES`` at a time a wide vector. In ``lengthwise`` the rows
are keys and the lanes values, and what a token finds in the state is written to it. In
``crosswise`` the rows are values and the lanes keys; what is written is known in advance.

Signals are flat (row, time, head, entry), the entries padded to a multiple of LANES; states are
(row, head, row of the state, lane).
"""

# mypy: ignore-errors

import numpy as np

from stateline.ops.numba_common.blocks import MODES, WIDE, read_block, scratch, write_block
from stateline.ops.numba_common.jit import kernel, summing_kernel
from stateline.ops.numba_common.vector import (
    LANES,
    align_stack,
    fold,
    load,
    load_each,
    store,
    zeros,
)


@kernel
def _write_and_read(s, rows, g, c, d, wrote, u, w, a, b, at):
    """S = g s + c u + d w, then a . s and b . s.

    The entries of g, c and d begin at ``wrote``, the entries of a and b at ``at``.
    """
    first, second = zeros(s, WIDE), zeros(s, WIDE)
    for i in range(0, rows, MODES):
        x = load_each(g, wrote + i, MODES) * load(s, i * LANES, WIDE)
        x = x + load_each(c, wrote + i, MODES) * u + load_each(d, wrote + i, MODES) * w
        store(s, i * LANES, x)
        first = first + load_each(a, at + i, MODES) * x
        second = second + load_each(b, at + i, MODES) * x
    return fold(first), fold(second)


@kernel
def lengthwise(
    a, b, c, d, x, own, decay, state, found, y, after, length, heads, rows, width, backwards, start,
    stop,
):  # fmt: skip
    """Tokens find u_t = a_t . S + own_t x_t and read y_t = b_t . S.

    Then S = g_t S + c_t u_t + d_t x_t. What a token finds is written in the pass over the state in
    which the next one reads. With ``backwards``, time runs from the last token to the first.
    """
    align_stack()
    blocks = width // LANES
    s, one = scratch(rows * LANES, x), scratch(rows, x)
    one[:] = 1
    for task in range(start, stop):
        each, lane = task // blocks, task % blocks * LANES
        row, head = each // heads, each % heads
        read_block(s, state, each * rows * width + lane, width, rows, LANES)
        u, w, wrote = zeros(s, LANES), zeros(s, LANES), 0
        for count in range(length):
            t = length - 1 - count if backwards else count
            token = (row * length + t) * heads + head
            at, out = token * rows, token * width + lane
            if count == 0:
                held, read = _write_and_read(s, rows, one, one, one, 0, u, w, a, b, at)
            else:
                held, read = _write_and_read(s, rows, decay, c, d, wrote, u, w, a, b, at)
            w = load(x, out, LANES)
            u = held + own[token] * w
            store(found, out, u)
            store(y, out, read)
            wrote = at
        if length > 0:
            _write_and_read(s, rows, decay, c, d, wrote, u, w, a, b, wrote)
        write_block(after, each * rows * width + lane, width, rows, LANES, s)


@kernel
def _read_and_write(s, rows, g, m, n, a, b, c, d, at):
    """A . s and b . s, then s = g s + c m + d n; g, m and n are the same for all rows."""
    first, second = zeros(s, WIDE), zeros(s, WIDE)
    for i in range(0, rows, MODES):
        x = load(s, i * LANES, WIDE)
        first = first + load_each(a, at + i, MODES) * x
        second = second + load_each(b, at + i, MODES) * x
        x = g * x + load_each(c, at + i, MODES) * m + load_each(d, at + i, MODES) * n
        store(s, i * LANES, x)
    return fold(first), fold(second)


@kernel
def crosswise(
    a, b, c, m, d, n, decay, state, first, second, length, heads, rows, width, backwards, start,
    stop,
):  # fmt: skip
    """Tokens read a_t . S and b_t . S; then S = S g_t + c_t m_t + d_t n_t.

    a, b, c and d run along the rows of the state; m, n and the outputs along its lanes.
    """
    align_stack()
    blocks = width // LANES
    s = scratch(rows * LANES, decay)
    for task in range(start, stop):
        each, lane = task // blocks, task % blocks * LANES
        row, head = each // heads, each % heads
        read_block(s, state, each * rows * width + lane, width, rows, LANES)
        for count in range(length):
            t = length - 1 - count if backwards else count
            token = (row * length + t) * heads + head
            at, out = token * rows, token * width + lane
            g, p, q = load(decay, out, LANES), load(m, out, LANES), load(n, out, LANES)
            held, read = _read_and_write(s, rows, g, p, q, a, b, c, d, at)
            store(first, out, held)
            store(second, out, read)


@summing_kernel
def delta_rule_step(q, k, v, log_decay, a, b, state, y, start, stop):
    """One step of rows ``start`` to ``stop``; states (row, head, key, value) change in place."""
    heads, keys, values = state.shape[1:]
    found = np.empty(values, state.dtype)
    for row in range(start, stop):
        for head in range(heads):
            found[:] = 0
            y[row, head] = 0
            for i in range(keys):
                for j in range(values):
                    found[j] += a[row, head, i] * state[row, head, i, j]
            for i in range(keys):
                decay = state.dtype.type(np.exp(log_decay[row, head, i]))
                key, query, place = k[row, head, i], q[row, head, i], b[row, head, i]
                for j in range(values):
                    new = decay * state[row, head, i, j] + place * found[j] + key * v[row, head, j]
                    state[row, head, i, j] = new
                    y[row, head, j] += query * new
