"""Delta rule by its recurrence, and its adjoint, which is a recurrence of the same kind.

A task is a block of lanes of one head: its part of the state (row, LANES) stays in the L1 cache
over time. ``MODES`` rows of the state are a wide vector. In ``lengthwise`` the rows are keys and
the lanes values, and what a token finds in the state is written to it. In ``crosswise`` the rows
are values and the lanes keys; what is written is known in advance.

Signals are flat (row, time, head, entry), the entries padded to a multiple of LANES; states are
(row, head, row of the state, lane). Keys decay by ``each`` (row, time, head, key), or if that is
``None``, all by ``decay`` (row, time, head).
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
def _write_and_read(s, rows, g, each, c, d, wrote, u, w, a, b, at):
    """S = g s + c u + d w, then a . s and b . s.

    The entries of ``each``, the decays of the rows, and of c and d begin at ``wrote``, the entries
    of a and b at ``at``. Without ``each``, all rows decay by g.
    """
    first, second = zeros(s, WIDE), zeros(s, WIDE)
    for i in range(0, rows, MODES):
        x = load(s, i * LANES, WIDE)
        if each is None:  # noqa: SIM108  # numba could not type an expression with both
            x = g * x
        else:
            x = load_each(each, wrote + i, MODES) * x
        x = x + load_each(c, wrote + i, MODES) * u
        if d is not None:
            x = x + load_each(d, wrote + i, MODES) * w
        store(s, i * LANES, x)
        first = first + load_each(a, at + i, MODES) * x
        if b is not None:
            second = second + load_each(b, at + i, MODES) * x
    return fold(first), fold(second)


@kernel
def lengthwise(
    a, b, c, d, x, own, decay, each, state, found, y, after, length, heads, rows, width, backwards,
    start, stop,
):  # fmt: skip
    """Tokens find u_t = a_t . S + own_t x_t and read y_t = b_t . S.

    Then S = g_t S + c_t u_t + d_t x_t; b and d may be ``None``. What a token finds is written in
    the pass over the state in which the next one reads. With ``backwards``, time runs from the last
    token to the first.
    """
    align_stack()
    blocks, one = width // LANES, x.dtype.type(1)
    s = scratch(rows * LANES, x)
    for task in range(start, stop):
        place, lane = task // blocks, task % blocks * LANES
        row, head = place // heads, place % heads
        read_block(s, state, place * rows * width + lane, width, rows, LANES)
        u, w, g, wrote, begun = zeros(s, LANES), zeros(s, LANES), one, 0, False
        for count in range(length):
            t = length - 1 - count if backwards else count
            token = (row * length + t) * heads + head
            at, out = token * rows, token * width + lane
            if begun:
                held, read = _write_and_read(s, rows, g, each, c, d, wrote, u, w, a, b, at)
            else:  # nothing is to be written, and nothing decays
                held, read = _write_and_read(s, rows, one, None, c, d, at, u, w, a, b, at)
            w = load(x, out, LANES)
            u = held + own[token] * w
            store(found, out, u)
            if b is not None:
                store(y, out, read)
            if each is None:
                g = decay[token]
            wrote, begun = at, True
        if begun:
            _write_and_read(s, rows, g, each, c, d, wrote, u, w, a, b, wrote)
        write_block(after, place * rows * width + lane, width, rows, LANES, s)


@kernel
def _read_and_write(s, rows, g, m, n, a, b, c, d, at):
    """A . s and b . s, then s = g s + c m + d n; g, m and n are the same for all rows."""
    first, second = zeros(s, WIDE), zeros(s, WIDE)
    for i in range(0, rows, MODES):
        x = load(s, i * LANES, WIDE)
        first = first + load_each(a, at + i, MODES) * x
        if b is not None:
            second = second + load_each(b, at + i, MODES) * x
        x = g * x + load_each(c, at + i, MODES) * m
        if d is not None:
            x = x + load_each(d, at + i, MODES) * n
        store(s, i * LANES, x)
    return fold(first), fold(second)


@kernel
def crosswise(
    a, b, c, m, d, n, decay, each, state, first, second, length, heads, rows, width, backwards,
    start, stop,
):  # fmt: skip
    """Tokens read a_t . S and b_t . S; then S = S g_t + c_t m_t + d_t n_t; b and d may be ``None``.

    a, b, c and d run along the rows of the state; m, n and the outputs along its lanes.
    """
    align_stack()
    blocks = width // LANES
    s = scratch(rows * LANES, m)
    for task in range(start, stop):
        place, lane = task // blocks, task % blocks * LANES
        row, head = place // heads, place % heads
        read_block(s, state, place * rows * width + lane, width, rows, LANES)
        for count in range(length):
            t = length - 1 - count if backwards else count
            token = (row * length + t) * heads + head
            at, out = token * rows, token * width + lane
            p, q = load(m, out, LANES), zeros(s, LANES)
            if d is not None:
                q = load(n, out, LANES)
            if each is None:
                held, read = _read_and_write(s, rows, decay[token], p, q, a, b, c, d, at)
            else:
                g = load(each, out, LANES)
                held, read = _read_and_write(s, rows, g, p, q, a, b, c, d, at)
            store(first, out, held)
            if b is not None:
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
