"""Linear attention by its recurrence: S_t = g_t S_{t-1} + k_t v_t, y_t = q_t S_t.

A task is a block of values of one head: its part of the state (key, LANES) goes through a block of
time in groups of ``KEYS`` rows, which stay in registers. The gradients are the same recurrence,
forward in time for q and backward for k and v, with the signals in other places.
"""

# mypy: ignore-errors

from stateline.ops.numba_common.blocks import read_block, scratch, write_block
from stateline.ops.numba_common.jit import kernel
from stateline.ops.numba_common.vector import LANES, align_stack, entry, load, store

TIME = 64
"""Tokens of a block."""

KEYS = 8
"""Rows of the state that go through a block together."""


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
def _advance(q, k, v, decay, y, rows, padded, first, state, old, backwards):
    """A block of tokens through rows ``first`` ... of the state; ``old``: outputs come first."""
    align_stack()
    at = first * LANES
    s0, s1 = load(state, at, LANES), load(state, at + LANES, LANES)
    s2, s3 = load(state, at + 2 * LANES, LANES), load(state, at + 3 * LANES, LANES)
    s4, s5 = load(state, at + 4 * LANES, LANES), load(state, at + 5 * LANES, LANES)
    s6, s7 = load(state, at + 6 * LANES, LANES), load(state, at + 7 * LANES, LANES)
    for count in range(rows):
        t = rows - 1 - count if backwards else count
        i, u, g = t * padded + first, load(v, t * LANES, LANES), entry(decay, t)
        s0, s1, s2, s3 = g * s0, g * s1, g * s2, g * s3
        s4, s5, s6, s7 = g * s4, g * s5, g * s6, g * s7
        if old:
            a = load(y, t * LANES, LANES) + entry(q, i) * s0 + entry(q, i + 1) * s1
            a = a + entry(q, i + 2) * s2 + entry(q, i + 3) * s3
            b = entry(q, i + 4) * s4 + entry(q, i + 5) * s5
            b = b + entry(q, i + 6) * s6 + entry(q, i + 7) * s7
            store(y, t * LANES, a + b)
        s0, s1 = s0 + entry(k, i) * u, s1 + entry(k, i + 1) * u
        s2, s3 = s2 + entry(k, i + 2) * u, s3 + entry(k, i + 3) * u
        s4, s5 = s4 + entry(k, i + 4) * u, s5 + entry(k, i + 5) * u
        s6, s7 = s6 + entry(k, i + 6) * u, s7 + entry(k, i + 7) * u
        if not old:
            a = load(y, t * LANES, LANES) + entry(q, i) * s0 + entry(q, i + 1) * s1
            a = a + entry(q, i + 2) * s2 + entry(q, i + 3) * s3
            b = entry(q, i + 4) * s4 + entry(q, i + 5) * s5
            b = b + entry(q, i + 6) * s6 + entry(q, i + 7) * s7
            store(y, t * LANES, a + b)
    store(state, at, s0)
    store(state, at + LANES, s1)
    store(state, at + 2 * LANES, s2)
    store(state, at + 3 * LANES, s3)
    store(state, at + 4 * LANES, s4)
    store(state, at + 5 * LANES, s5)
    store(state, at + 6 * LANES, s6)
    store(state, at + 7 * LANES, s7)


@kernel
def scan(
    q, k, v, decay, y, state, after, length, heads, of_q, of_k, of_v, keys, values, old, backwards,
    start, stop,
):  # fmt: skip
    """Tasks ``start`` to ``stop`` of (row, head, block of values).

    Signals are flat (row, time, head, entry), with ``of_q``, ``of_k`` and ``of_v`` heads, each for
    as many adjacent heads of the output; decay is (row, time, head). With ``backwards``, time runs
    from the last token to the first.
    """
    align_stack()
    blocks, padded = (values + LANES - 1) // LANES, (keys + KEYS - 1) // KEYS * KEYS
    x, g = scratch(padded * LANES, y), scratch(TIME, y)
    qb, kb = scratch(TIME * padded, y), scratch(TIME * padded, y)
    vb, yb = scratch(TIME * LANES, y), scratch(TIME * LANES, y)
    qb[:] = 0
    kb[:] = 0
    count = (length + TIME - 1) // TIME
    for task in range(start, stop):
        row, head, block = task // blocks // heads, task // blocks % heads, task % blocks
        lanes, place = min(LANES, values - block * LANES), block * LANES
        kept = (row * heads + head) * keys * values + place
        x[:] = 0
        read_block(x, state, kept, values, keys, lanes)
        for n in range(count):
            first = (count - 1 - n if backwards else n) * TIME
            rows, token = min(TIME, length - first), row * length + first
            at_q, at_k = token * of_q + head * of_q // heads, token * of_k + head * of_k // heads
            at_v = (token * of_v + head * of_v // heads) * values + place
            _read_keys(qb, q, at_q * keys, of_q * keys, rows, keys, padded)
            _read_keys(kb, k, at_k * keys, of_k * keys, rows, keys, padded)
            read_block(vb, v, at_v, of_v * values, rows, lanes)
            for t in range(rows):
                g[t] = decay[(token + t) * heads + head]
            yb[:] = 0
            for i in range(0, padded, KEYS):
                _advance(qb, kb, vb, g, yb, rows, padded, i, x, old, backwards)
            out = (token * heads + head) * values + place
            write_block(y, out, heads * values, rows, lanes, yb)
        write_block(after, kept, values, keys, lanes, x)


@summing_kernel
def linear_attention_step(q, k, v, log_decay, state, y, after, start, stop):
    """Rows ``start`` to ``stop``: states (row, head, key, value); log_decay may be ``None``."""
    heads, keys, values = state.shape[1:]
    each, one = heads // q.shape[1], state.dtype.type(1)
    for row in range(start, stop):
        for head in range(heads):
            g = head // each
            decay = one if log_decay is None else state.dtype.type(np.exp(log_decay[row, head]))
            y[row, head] = 0
            for i in range(keys):
                key, query = k[row, g, i], q[row, g, i]
                for j in range(values):
                    new = decay * state[row, head, i, j] + key * v[row, head, j]
                    after[row, head, i, j] = new
                    y[row, head, j] += query * new
