r"""Gated delta rule by its recurrence, and its adjoint.

A task is a block of values of one head: its part of the state (key, LANES) goes through time in the
fastest cache. Rows of the state are ``MODES`` at a time a wide vector. A token reads the state
before it writes, so its write is left to the pass over the state in which the next one reads.

The gradients of keys and queries are sums over values. For these the same two kernels take the
transposed state, with the keys in lanes; what is written is then known in advance.

Signals are flat (row, time, head, entry), the entries padded to a multiple of LANES; decay and beta
are (row, time, head), states (row, head, key, value). ``a``, ``b``, ``c`` and ``d`` below run along
the rows of the state, ``u``, ``w`` and the outputs along the lanes.
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
    load_each,
    store,
    zeros,
)


@kernel
def _visit(s, rows, g, c, d, wrote, u, w, a, b, at):
    """Write and let decay, s = g (s + c u + d w), then read: a . s and b . s.

    The entries of c and d begin at ``wrote``, the entries of a and b at ``at``; d and b may be
    ``None``.
    """
    first, second = zeros(s, WIDE), zeros(s, WIDE)
    for i in range(0, rows, MODES):
        x = load(s, i * LANES, WIDE) + load_each(c, wrote + i, MODES) * u
        if d is not None:
            x = x + load_each(d, wrote + i, MODES) * w
        x = g * x
        store(s, i * LANES, x)
        first = first + load_each(a, at + i, MODES) * x
        if b is not None:
            second = second + load_each(b, at + i, MODES) * x
    return fold(first), fold(second)


@summing_kernel
def _dot(a, b, at, count):
    """Product of two rows."""
    total = a.dtype.type(0)
    for i in range(at, at + count):
        total += entry(a, i) * entry(b, i)
    return total


@kernel
def forward(
    a, b, c, x, beta, decay, state, found, y, states, length, time, heads, rows, width, known,
    start, stop,
):  # fmt: skip
    """S_t = g_t S_{t-1} + beta_t c_t w_t, with w_t = x_t - a_t . g_t S_{t-1}.

    ``y`` receives b_t . S_t, and ``found`` receives w_t; both may be ``None``. If the written
    values are ``known``, w_t is x_t, and ``found`` receives beta_t a_t . g_t S_{t-1}. ``states``
    receives the state after every ``time`` tokens, and the last state.
    """
    align_stack()
    blocks, count = width // LANES, max(1, (length + time - 1) // time)
    s, one = scratch(rows * LANES, x), x.dtype.type(1)
    for task in range(start, stop):
        each, lane = task // blocks, task % blocks * LANES
        row, head = each // heads, each % heads
        read_block(s, state, each * rows * width + lane, width, rows, LANES)
        for n in range(count):
            u, wrote = zeros(s, LANES), 0
            for t in range(n * time, min(length, (n + 1) * time)):
                token = (row * length + t) * heads + head
                at, out = token * rows, token * width + lane
                held, read = _visit(s, rows, decay[token], c, None, wrote, u, u, a, b, at)
                w = load(x, out, LANES)
                if known:
                    held = beta[token] * held
                else:
                    w = w - held
                    held = w
                u, wrote = beta[token] * w, at
                if found is not None:
                    store(found, out, held)
                if y is not None:
                    store(y, out, read + _dot(b, c, at, rows) * u)
            _visit(s, rows, one, c, None, wrote, u, u, a, b, wrote)
            write_block(states, (each * count + n) * rows * width + lane, width, rows, LANES, s)


@kernel
def adjoint(
    a, c, d, x, z, beta, decay, state, y, states, length, time, heads, rows, width, start, stop
):  # fmt: skip
    """The adjoint, backward from the last token: A_{t-1} = g_t (A_t + c_t x_t - beta_t d_t z_t).

    ``y`` receives a_t . (A_t + c_t x_t), which is z_t if z is ``None``; otherwise it is multiplied
    by beta_t. ``states`` receives A before every ``time`` tokens, the first included.
    """
    align_stack()
    blocks, count = width // LANES, max(1, (length + time - 1) // time)
    s, one = scratch(rows * LANES, x), x.dtype.type(1)
    for task in range(start, stop):
        each, lane = task // blocks, task % blocks * LANES
        row, head = each // heads, each % heads
        read_block(s, state, each * rows * width + lane, width, rows, LANES)
        for n in range(count - 1, -1, -1):
            u, w, g, wrote = zeros(s, LANES), zeros(s, LANES), one, 0
            for t in range(min(length, (n + 1) * time) - 1, n * time - 1, -1):
                token = (row * length + t) * heads + head
                at, out = token * rows, token * width + lane
                read, _ = _visit(s, rows, g, c, d, wrote, u, w, a, None, at)
                u = load(x, out, LANES)
                read = read + _dot(a, c, at, rows) * u
                w = -beta[token] * read
                if z is not None:
                    read = beta[token] * read
                    w = -beta[token] * load(z, out, LANES)
                store(y, out, read)
                g, wrote = decay[token], at
            _visit(s, rows, g, c, d, wrote, u, w, a, None, wrote)
            write_block(states, (each * count + n) * rows * width + lane, width, rows, LANES, s)


@summing_kernel
def gated_delta_step(q, k, v, log_decay, beta, state, y, start, stop):
    """One step of rows ``start`` to ``stop``: what the key holds, its replacement, the output.

    States (row, head, key, value) change in place.
    """
    heads, keys, values = state.shape[1:]
    change = np.empty(values, state.dtype)
    for row in range(start, stop):
        for head in range(heads):
            decay = state.dtype.type(np.exp(log_decay[row, head]))
            change[:] = 0
            y[row, head] = 0
            for i in range(keys):
                key = k[row, head, i]
                for j in range(values):
                    change[j] += key * (decay * state[row, head, i, j])
            for j in range(values):
                change[j] = beta[row, head] * (v[row, head, j] - change[j])
            for i in range(keys):
                key, query = k[row, head, i], q[row, head, i]
                for j in range(values):
                    new = decay * state[row, head, i, j] + key * change[j]
                    state[row, head, i, j] = new
                    y[row, head, j] += query * new
