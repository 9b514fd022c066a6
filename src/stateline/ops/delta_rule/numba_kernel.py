"""Delta rule by its recurrence, and its adjoint, which is a recurrence of the same kind.

A task is a block of lanes of one head: its part of the state (row, LANES) stays in the L1 cache
over time. ``MODES`` rows of the state are a wide vector. For some gradients the state is
transposed: its rows are values and its lanes keys.

Signals are flat (row, time, head, entry), the entries padded to a multiple of LANES; states are
(row, head, row of the state, lane). Rows decay by ``along`` or lanes by ``across`` (row, time,
head, entry); if both are ``None``, all by ``decay`` (row, time, head).
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
def _write_and_read(s, rows, g, along, c, d, wrote, u, w, a, b, at):
    """S = g s + c u + d w, then a . s and b . s.

    The entries of ``along``, the decays of the rows, and of c and d begin at ``wrote``, the entries
    of a and b at ``at``. Without ``along``, all rows decay by g.
    """
    first, second = zeros(s, WIDE), zeros(s, WIDE)
    for i in range(0, rows, MODES):
        x = load(s, i * LANES, WIDE)
        if along is None:  # noqa: SIM108  # numba could not type an expression with both
            x = g * x
        else:
            x = load_each(along, wrote + i, MODES) * x
        x = x + load_each(c, wrote + i, MODES) * u
        if d is not None:
            x = x + load_each(d, wrote + i, MODES) * w
        store(s, i * LANES, x)
        first = first + load_each(a, at + i, MODES) * x
        if b is not None:
            second = second + load_each(b, at + i, MODES) * x
    return fold(first), fold(second)


@kernel
def scan(
    a, b, c, d, x, own, known, along, across, decay, state, found, y, after, length, heads, rows,
    width, backwards, start, stop,
):  # fmt: skip
    """Tokens find u_t = a_t . S + own_t x_t and read y_t = b_t . S.

    Then S = g_t S + c_t u_t + d_t x_t, with ``known`` in place of u if it is given. What is
    ``None`` (b, d, x, own, known or after) is left out. A token's write is in the pass over the
    state in which the next one reads. With ``backwards``, time runs from the last token to the
    first.
    """
    align_stack()
    blocks, one = width // LANES, state.dtype.type(1)
    s = scratch(rows * LANES, state)
    for task in range(start, stop):
        place, lane = task // blocks, task % blocks * LANES
        row, head = place // heads, place % heads
        read_block(s, state, place * rows * width + lane, width, rows, LANES)
        u = w = g = zeros(s, LANES)
        wrote, begun = 0, False
        for count in range(length):
            t = length - 1 - count if backwards else count
            token = (row * length + t) * heads + head
            at, out = token * rows, token * width + lane
            if begun:
                held, read = _write_and_read(s, rows, g, along, c, d, wrote, u, w, a, b, at)
            else:  # nothing is to be written, and nothing decays
                held, read = _write_and_read(s, rows, one, None, c, d, at, u, w, a, b, at)
            if x is not None:
                w = load(x, out, LANES)
            u = held
            if own is not None:
                u = u + own[token] * w
            store(found, out, u)
            if known is not None:
                u = load(known, out, LANES)
            if b is not None:
                store(y, out, read)
            g = zeros(s, LANES) + decay[token]
            if across is not None:
                g = load(across, out, LANES)
            wrote, begun = at, True
        if after is not None:
            if begun:
                _write_and_read(s, rows, g, along, c, d, wrote, u, w, a, b, wrote)
            write_block(after, place * rows * width + lane, width, rows, LANES, s)


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
