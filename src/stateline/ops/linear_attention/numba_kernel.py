"""Linear attention by its recurrence: S_t = g_t S_{t-1} + k_t v_t, y_t = q_t S_t.

A task is a block of values of one head: its part of the state (key, LANES) goes through a block of
time in groups of ``KEYS`` rows, which stay in registers. The gradients are the same recurrence,
forward in time for q and backward for k and v, with the signals in other places.
"""

# mypy: ignore-errors

import numpy as np

from stateline.ops.numba_common.blocks import MODES, WIDE, read_block, scratch, write_block
from stateline.ops.numba_common.jit import kernel, summing_kernel
from stateline.ops.numba_common.vector import (
    LANES,
    align_stack,
    entry,
    fold,
    load,
    load_column,
    store,
    sum_channels,
)

TIME = 64
"""Tokens of a block."""

KEYS = 8
"""Rows of the state that go through a block together, as one vector of ``ALL`` lanes."""

ALL = KEYS * LANES


@kernel
def _read_keys(block, x, first, stride, rows, keys, padded):
    """Keys or queries of a block; what pads them stays zero."""
    vectors = keys // LANES * LANES
    for t in range(rows):
        for i in range(0, vectors, LANES):
            store(block, t * padded + i, load(x, first + t * stride + i, LANES))
        for i in range(vectors, keys):
            block[t * padded + i] = x[first + t * stride + i]


@kernel
def _advance(q, k, v, along, across, decay, y, rows, padded, first, state, old, backwards):
    """A block of tokens through ``KEYS`` rows of the state; only this task uses these rows.

    ``first`` is their first entry in keys and queries; ``old``: outputs come first. Rows decay by
    ``along`` or lanes by ``across``; if both are ``None``, all by ``decay``.
    """
    align_stack()
    s = load(state, 0, ALL)
    for count in range(rows):
        t = rows - 1 - count if backwards else count
        i, u = t * padded + first, load(v, t * LANES, LANES)
        if along is not None:
            s = load_column(along, i, 1, KEYS) * s
        elif across is not None:
            s = load(across, t * LANES, LANES) * s
        else:
            s = entry(decay, t) * s
        query, read = load_column(q, i, 1, KEYS), load(y, t * LANES, LANES)
        if old:
            store(y, t * LANES, read + fold(query * s))
        s = s + load_column(k, i, 1, KEYS) * u
        if not old:
            store(y, t * LANES, read + fold(query * s))
    store(state, 0, s)


@kernel
def _add_products(sums, w, y, rows, dots, at, stride):
    """Add y to sums, and write its products with w; y is lost."""
    for t in range(0, rows, MODES):
        added = load(y, t * LANES, WIDE)
        store(sums, t * LANES, load(sums, t * LANES, WIDE) + added)
        store(y, t * LANES, sum_channels(load(w, t * LANES, WIDE) * added))
        for i in range(min(MODES, rows - t)):
            dots[at + (t + i) * stride] = y[t * LANES + i]


@kernel
def scan(
    q, k, v, w, along, across, decay, y, dots, state, after, batch, length, heads, of_q, of_k, of_v,
    of_y, keys, values, old, backwards, start, stop,
):  # fmt: skip
    """Tasks ``start`` to ``stop`` of (row, output, block of values).

    Signals are flat (row, time, head, entry), with ``of_q``, ``of_k`` and ``of_v`` heads, each for
    as many adjacent heads of the state. Its rows decay by ``along`` (row, time, head, key) or its
    lanes by ``across`` (row, time, head, value); if both are ``None``, all by ``decay`` (row, time,
    head). Each of the ``of_y`` outputs is the sum over as many adjacent heads, and ``dots`` (block,
    row, time, head) takes w . y of every head; w is of the shape of y, or ``None``. With
    ``backwards``, time runs from the last token to the first.
    """
    align_stack()
    blocks, padded = (values + LANES - 1) // LANES, (keys + KEYS - 1) // KEYS * KEYS
    each, count, size = heads // of_y, (length + TIME - 1) // TIME, padded * LANES
    x, g = scratch(each * size, y), scratch(TIME, y)
    a, c = scratch(TIME * padded, y), scratch(TIME * LANES, y)
    qb, kb = scratch(TIME * padded, y), scratch(TIME * padded, y)
    vb, yb = scratch(TIME * LANES, y), scratch(TIME * LANES, y)
    wb, sums = scratch(TIME * LANES, y), scratch(TIME * LANES, y)
    qb[:] = 0
    kb[:] = 0
    a[:] = 0
    for task in range(start, stop):
        row, output, block = task // blocks // of_y, task // blocks % of_y, task % blocks
        lanes, place = min(LANES, values - block * LANES), block * LANES
        x[:] = 0
        for i in range(each):
            kept = (row * heads + output * each + i) * keys * values + place
            read_block(x[i * size : (i + 1) * size], state, kept, values, keys, lanes)
        for n in range(count):
            first = (count - 1 - n if backwards else n) * TIME
            rows, token = min(TIME, length - first), row * length + first
            out = (token * of_y + output) * values + place
            if w is not None:
                read_block(wb, w, out, of_y * values, rows, lanes)
                sums[:] = 0
            for i in range(each):
                head = output * each + i
                at_q = (token * of_q + head * of_q // heads) * keys
                at_k = (token * of_k + head * of_k // heads) * keys
                at_v = (token * of_v + head * of_v // heads) * values + place
                _read_keys(qb, q, at_q, of_q * keys, rows, keys, padded)
                _read_keys(kb, k, at_k, of_k * keys, rows, keys, padded)
                read_block(vb, v, at_v, of_v * values, rows, lanes)
                at = token * heads + head
                if along is not None:
                    _read_keys(a, along, at * keys, heads * keys, rows, keys, padded)
                elif across is not None:
                    read_block(c, across, at * values + place, heads * values, rows, lanes)
                else:
                    for t in range(rows):
                        g[t] = decay[at + t * heads]
                yb[:] = 0
                for j in range(0, padded, KEYS):
                    own = x[i * size + j * LANES : i * size + (j + KEYS) * LANES]
                    if along is not None:
                        _advance(qb, kb, vb, a, None, g, yb, rows, padded, j, own, old, backwards)
                    elif across is not None:
                        _advance(qb, kb, vb, None, c, g, yb, rows, padded, j, own, old, backwards)
                    else:
                        _advance(
                            qb, kb, vb, None, None, g, yb, rows, padded, j, own, old, backwards
                        )
                if w is not None:
                    at = ((block * batch + row) * length + first) * heads + head
                    _add_products(sums, wb, yb, rows, dots, at, heads)
            write_block(y, out, of_y * values, rows, lanes, yb if w is None else sums)
        for i in range(each):
            kept = (row * heads + output * each + i) * keys * values + place
            write_block(after, kept, values, keys, lanes, x[i * size : (i + 1) * size])


@summing_kernel
def linear_attention_step(q, k, v, log_decay, state, y, start, stop):
    """One step of rows ``start`` to ``stop``; states (row, head, key, value) change in place.

    ``log_decay`` (row, head, one for all or each key) may be ``None``.
    """
    heads, keys, values = state.shape[1:]
    each, one = heads // q.shape[1], state.dtype.type(1)
    for row in range(start, stop):
        for head in range(heads):
            g = head // each
            decay = one
            y[row, head] = 0
            for i in range(keys):
                key, query = k[row, g, i], q[row, g, i]
                if log_decay is not None and i < log_decay.shape[2]:
                    decay = state.dtype.type(np.exp(log_decay[row, head, i]))
                for j in range(values):
                    new = decay * state[row, head, i, j] + key * v[row, head, j]
                    state[row, head, i, j] = new
                    y[row, head, j] += query * new
