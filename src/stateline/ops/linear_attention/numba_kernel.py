"""Linear attention by its recurrence: S_t = g_t S_{t-1} + k_t v_t, y_t = q_t S_t.

A task is a block of values of one head: its part of the state (key, LANES) goes through a block of
time in groups of ``KEYS`` rows, which stay in registers. With one decay per head, it may also go
through chunks of time by products of matrices, which load and multiply less per token. The
gradients are the same recurrence, forward in time for q and backward for k and v, with the signals
in other places.
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
    load_each,
    load_rows,
    store,
    sum_channels,
    zeros,
)

TIME = 32
"""Tokens of a block."""

CHUNK = 16
"""Tokens that read and write the state together, by products of matrices."""

BLOCKS = 8
"""Most blocks of values that go through time together: they share what was read of q and k."""

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
def _advance(q, k, v, along, across, decay, y, rows, padded, state, old, backwards):
    """A block of tokens through the state, of which ``KEYS`` rows at a time stay in registers.

    ``old``: outputs come first. Rows decay by ``along`` or lanes by ``across``; if both are
    ``None``, all by ``decay``.
    """
    align_stack()
    y[:] = 0
    for first in range(0, padded, KEYS):
        s = load(state, first * LANES, ALL)
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
        store(state, first * LANES, s)


@kernel
def _advance_chunks(q, k, v, inside, since, until, begin, y, rows, padded, state, backwards):
    """The same in chunks with what ``within`` found, from ``begin`` on; v is lost.

    In a chunk, y = since (q S) + inside v, then S = kept S + k^T (until v).
    """
    align_stack()
    chunks = (rows + CHUNK - 1) // CHUNK
    for n in range(chunks):
        first = (chunks - 1 - n if backwards else n) * CHUNK
        stop, at = min(rows, first + CHUNK), begin + first
        for t in range(first, stop, KEYS):
            total, place = zeros(y, ALL), t * padded
            for i in range(padded):
                row = load(state, i * LANES, LANES)
                total = total + load_column(q, place + i, padded, KEYS) * row
            total = load_each(since, begin + t, KEYS) * total
            place = (begin + t) * CHUNK - first
            earliest, latest = (t, stop) if backwards else (first, min(stop, t + KEYS))
            for s in range(earliest, latest):
                factors = load_column(inside, place + s, CHUNK, KEYS)
                total = total + factors * load(v, s * LANES, LANES)
            store(y, t * LANES, total)
        kept = entry(since, at if backwards else begin + stop - 1)
        for s in range(first, stop):
            store(v, s * LANES, entry(until, begin + s) * load(v, s * LANES, LANES))
        for j in range(0, padded, KEYS):
            total = kept * load(state, j * LANES, ALL)
            for s in range(first, stop):
                total = total + load_column(k, s * padded + j, 1, KEYS) * load(v, s * LANES, LANES)
            store(state, j * LANES, total)


@kernel
def within(
    q, k, decay, inside, since, until, length, heads, of_q, of_k, keys, old, backwards, start, stop
):
    """Tasks ``start`` to ``stop`` of (row, chunk): what does not depend on the state.

    ``since`` and ``until`` (row, head, time) are the decays of the state before the chunk until a
    token reads it, and of what a token writes until the end of the chunk. ``inside`` (row, head,
    time, CHUNK) are the products of a query with the keys of its chunk, which have decayed.
    """
    align_stack()
    count, vectors = (length + CHUNK - 1) // CHUNK, (keys + LANES - 1) // LANES * LANES
    shared = max(of_q, of_k)
    qb, kb = scratch(CHUNK * vectors, q), scratch(CHUNK * vectors, q)
    scores, left = scratch(CHUNK * CHUNK, q), scratch(CHUNK, q)
    qb[:] = 0
    kb[:] = 0
    for task in range(start, stop):
        row, first = task // count, task % count * CHUNK
        rows, token = min(CHUNK, length - first), row * length + first
        for group in range(shared):
            at_q = (token * of_q + group * of_q // shared) * keys
            at_k = (token * of_k + group * of_k // shared) * keys
            _read_keys(qb, q, at_q, of_q * keys, rows, keys, vectors)
            _read_keys(kb, k, at_k, of_k * keys, rows, keys, vectors)
            scores[:] = 0
            for t in range(rows):
                begin, end = (t // MODES * MODES, rows) if backwards else (0, t + 1)
                for s in range(begin, end, MODES):
                    total = zeros(scores, WIDE)
                    for i in range(0, vectors, LANES):
                        wide = load_rows(kb, s * vectors + i, vectors, MODES)
                        total = total + load(qb, t * vectors + i, LANES) * wide
                    store(scores, t * CHUNK + s, sum_channels(total))
            for head in range(group * heads // shared, (group + 1) * heads // shared):
                at = (row * heads + head) * count * CHUNK + first
                kept = decay.dtype.type(1)
                left[:] = 0
                for n in range(rows):
                    t = rows - 1 - n if backwards else n
                    g = decay[(token + t) * heads + head]
                    kept *= g
                    since[at + t] = kept
                    for s in range(CHUNK):
                        left[s] *= g
                    if not old:
                        left[t] = 1
                    for s in range(CHUNK):
                        inside[(at + t) * CHUNK + s] = left[s] * scores[t * CHUNK + s]
                    left[t] = 1
                for s in range(rows):
                    until[at + s] = left[s]


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
    q, k, v, w, along, across, decay, inside, since, until, y, dots, state, after, batch, length,
    heads, of_q, of_k, of_v, of_y, keys, values, old, backwards, start, stop,
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
    room, spare = TIME * LANES, (length + CHUNK - 1) // CHUNK * CHUNK
    most = min(BLOCKS, blocks)
    x, g = scratch(each * most * size, y), scratch(TIME, y)
    a, c = scratch(TIME * padded, y), scratch(room, y)
    qb, kb = scratch(TIME * padded, y), scratch(TIME * padded, y)
    vb, yb = scratch(room, y), scratch(room, y)
    wb, sums = scratch(most * room, y), scratch(most * room, y)
    qb[:] = 0
    kb[:] = 0
    a[:] = 0
    task = start
    while task < stop:
        row, output, block = task // blocks // of_y, task // blocks % of_y, task % blocks
        several, place = min(most, blocks - block, stop - task), block * LANES
        task += several
        x[:] = 0
        for i in range(each):
            kept = (row * heads + output * each + i) * keys * values + place
            for b in range(several):
                lanes, own = min(LANES, values - place - b * LANES), (i * most + b) * size
                read_block(x[own : own + size], state, kept + b * LANES, values, keys, lanes)
        for n in range(count):
            first = (count - 1 - n if backwards else n) * TIME
            rows, token = min(TIME, length - first), row * length + first
            out = (token * of_y + output) * values + place
            if w is not None:
                sums[:] = 0
                for b in range(several):
                    lanes, there = min(LANES, values - place - b * LANES), b * room
                    read_block(
                        wb[there : there + room], w, out + b * LANES, of_y * values, rows, lanes
                    )
            for i in range(each):
                head = output * each + i
                at_q = (token * of_q + head * of_q // heads) * keys
                at_k = (token * of_k + head * of_k // heads) * keys
                at_v = (token * of_v + head * of_v // heads) * values + place
                _read_keys(qb, q, at_q, of_q * keys, rows, keys, padded)
                _read_keys(kb, k, at_k, of_k * keys, rows, keys, padded)
                at = token * heads + head
                if along is not None:
                    _read_keys(a, along, at * keys, heads * keys, rows, keys, padded)
                elif across is None:
                    for t in range(rows):
                        g[t] = decay[at + t * heads]
                for b in range(several):
                    lanes, there = min(LANES, values - place - b * LANES), b * room
                    own = x[(i * most + b) * size : (i * most + b + 1) * size]
                    read_block(vb, v, at_v + b * LANES, of_v * values, rows, lanes)
                    if len(inside):
                        begin = (row * heads + head) * spare + first
                        _advance_chunks(
                            qb, kb, vb, inside, since, until, begin, yb, rows, padded, own,
                            backwards,
                        )  # fmt: skip
                    elif along is not None:
                        _advance(qb, kb, vb, a, None, g, yb, rows, padded, own, old, backwards)
                    elif across is not None:
                        at_c = at * values + place + b * LANES
                        read_block(c, across, at_c, heads * values, rows, lanes)
                        _advance(qb, kb, vb, None, c, g, yb, rows, padded, own, old, backwards)
                    else:
                        _advance(qb, kb, vb, None, None, g, yb, rows, padded, own, old, backwards)
                    if w is None:
                        write_block(y, out + b * LANES, of_y * values, rows, lanes, yb)
                    else:
                        to = (((block + b) * batch + row) * length + first) * heads + head
                        own = sums[there : there + room]
                        _add_products(own, wb[there : there + room], yb, rows, dots, to, heads)
            if w is not None:
                for b in range(several):
                    lanes, there = min(LANES, values - place - b * LANES), b * room
                    write_block(
                        y, out + b * LANES, of_y * values, rows, lanes, sums[there : there + room]
                    )
        for i in range(each):
            kept = (row * heads + output * each + i) * keys * values + place
            for b in range(several):
                lanes, own = min(LANES, values - place - b * LANES), (i * most + b) * size
                write_block(after, kept + b * LANES, values, keys, lanes, x[own : own + size])


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
