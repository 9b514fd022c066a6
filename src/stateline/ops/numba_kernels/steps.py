"""One token: steps of the recurrences, whose states LLVM's vectoriser handles as they lie.

Arrays have all their axes: numba lets an index be negative, and only with an index of its own does
LLVM see that the innermost one is not.
"""

# mypy: ignore-errors

import numpy as np

from stateline.ops.numba_kernels.jit import kernel, summing_kernel
from stateline.ops.numba_kernels.transition import transition
from stateline.ops.numba_kernels.vector import LOG2_E, exp2


@kernel
def rounded_transition(log_a, dtype_of):
    """Planes (4, mode) of all transitions: rounded to the precision of an array, and the rest."""
    a = np.empty(log_a.size)
    transition(log_a.reshape(-1), a)
    size = a.size // 2
    planes = np.empty((4, size), dtype_of.dtype)
    for n in range(size):
        planes[0, n], planes[1, n] = a[n], a[size + n]
        planes[2, n] = a[n] - np.float64(planes[0, n])
        planes[3, n] = a[size + n] - np.float64(planes[1, n])
    return planes


@kernel
def planes_of(a, head, modes):
    """The four planes of the transitions of one channel; one channel may serve all."""
    n = head * modes if a.shape[1] > modes else 0
    return a[0, n : n + modes], a[1, n : n + modes], a[2, n : n + modes], a[3, n : n + modes]


@kernel
def advance_modes(x, z, ar, ai, er, ei, b, u):
    """Set z = a x + b u for the modes of one channel, with a = ar + er + i (ai + ei).

    Reordered sums would lose the rest e of the rounded transition.
    """
    for n in range(len(ar)):
        xr, xi = x[2 * n], x[2 * n + 1]
        rest_r = er[n] * xr - ei[n] * xi + b[2 * n] * u
        rest_i = er[n] * xi + ei[n] * xr + b[2 * n + 1] * u
        z[2 * n] = ar[n] * xr - ai[n] * xi + rest_r
        z[2 * n + 1] = ar[n] * xi + ai[n] * xr + rest_i


@summing_kernel
def read_modes(c, z):
    """2 Re c z, for one output of one channel."""
    total = c.dtype.type(0)
    for n in range(len(c) // 2):
        total += c[2 * n] * z[2 * n] - c[2 * n + 1] * z[2 * n + 1]
    return 2 * total


@summing_kernel
def diagonal_step(u, log_a, b, c, x, y, z, start, stop):
    """Channels ``start`` to ``stop``: states x to z (row, channel, 2 modes), outputs into y.

    The parts of complex numbers are neighbours on one axis with the modes: as pairs on an axis of
    their own, LLVM does not vectorise them.
    """
    rows, channels = u.shape
    modes, own = b.shape[1] // 2, log_a.shape[0] > 1
    a = rounded_transition(log_a[start:stop] if own else log_a, x)
    for channel in range(start, stop):
        ar, ai, er, ei = planes_of(a, channel - start, modes)
        for row in range(rows):
            advance_modes(
                x[row, channel], z[row, channel], ar, ai, er, ei, b[channel], u[row, channel]
            )
            for output in range(channel, c.shape[0], channels):
                y[row, output] = read_modes(c[output], z[row, channel])


@summing_kernel
def selective_step(u, dt, a, b, c, h, y, after, start, stop):
    """Rows ``start`` to ``stop`` of a selective scan; b and c are (row, group, d_state)."""
    channels, d_state = a.shape
    each, log2e = channels // b.shape[1], u.dtype.type(LOG2_E)
    for row in range(start, stop):
        for channel in range(channels):
            g, total = channel // each, u.dtype.type(0)
            rate, x = log2e * dt[row, channel], dt[row, channel] * u[row, channel]
            for n in range(d_state):
                new = exp2(rate * a[channel, n]) * h[row, channel, n] + x * b[row, g, n]
                after[row, channel, n] = new
                total += c[row, g, n] * new
            y[row, channel] = total


@summing_kernel
def h3_step(
    q, k, v, weights, log_a, b, c, skip, past, before, x, z, y, start, stop
):  # fmt: skip
    """Heads ``start`` to ``stop`` of the H3 core: states past to before, and x to z.

    States x are (row, key entry, value entry, head, 2 modes). The weights, and the keys in past,
    lie with the oldest first.
    """
    heads, modes, own = b.shape[0], b.shape[1] // 2, log_a.shape[0] > 1
    width, first = q.shape[1] // heads, start * (q.shape[1] // heads)
    a = rounded_transition(log_a[start:stop] if own else log_a, x)
    shifted = np.empty((stop - start) * width, q.dtype)
    for row in range(q.shape[0]):
        shift_keys(
            shifted, k[row, first:], weights[:, first:], past[row, :, first:],
            before[row, :, first:],
        )  # fmt: skip
        for head in range(start, stop):
            ar, ai, er, ei = planes_of(a, head - start, modes)
            for output in range(head, c.shape[0], heads):
                place = output // heads * q.shape[1] + head * width
                y[row, place : place + width] = 0
            for i in range(width):
                for j in range(width):
                    pair = shifted[head * width + i - first] * v[row, head * width + j]
                    new = z[row, i, j, head]
                    advance_modes(x[row, i, j, head], new, ar, ai, er, ei, b[head], pair)
                    for output in range(head, c.shape[0], heads):
                        place = output // heads * q.shape[1] + head * width + j
                        read = read_modes(c[output], new) + skip[output] * pair
                        y[row, place] += q[row, head * width + i] * read


@summing_kernel
def shift_keys(shifted, k, weights, past, before):
    """The filter of the keys for one row, and the keys before the next token."""
    held = len(past)
    for i in range(len(shifted)):
        shifted[i] = weights[held, i] * k[i]
    for t in range(held):
        for i in range(len(shifted)):
            shifted[i] += weights[t, i] * past[t, i]
            before[t, i] = past[t + 1, i] if t + 1 < held else k[i]


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


@summing_kernel
def gated_delta_step(q, k, v, log_decay, beta, state, y, after, start, stop):
    """Rows ``start`` to ``stop``: what the key holds, then its replacement and the output."""
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
                    after[row, head, i, j] = new
                    y[row, head, j] += query * new
