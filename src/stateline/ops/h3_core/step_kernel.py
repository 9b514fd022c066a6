"""One token through the core of H3, on states that change in place."""

# mypy: ignore-errors

import numpy as np

from stateline.ops.diagonal_ssm.step_kernel import planes_of, read_modes, rotate_modes
from stateline.ops.numba_common.jit import summing_kernel
from stateline.ops.short_conv.step_kernel import filter_advance_row


@summing_kernel
def h3_advance(q, k, v, weights, a, b, c, skip, past, x, y, start, stop):
    """Heads ``start`` to ``stop`` of the H3 core.

    States x are (row, key entry, value entry, head, 2 modes). The weights, and the keys in past,
    lie with the oldest first.
    """
    heads, modes = b.shape[0], b.shape[1] // 2
    rows, width = q.shape[0], q.shape[1] // heads
    shifted, taps = np.empty(q.shape, q.dtype), weights.reshape(-1)
    for row in range(rows):
        inputs = past[row].reshape(-1)
        filter_advance_row(shifted[row], k[row], taps, inputs, start * width, stop * width)
    for head in range(start, stop):
        ar, ai, er, ei = planes_of(a, head, modes)
        for row in range(rows):
            for output in range(head, c.shape[0], heads):
                place = output // heads * q.shape[1] + head * width
                for j in range(width):
                    y[row, place + j] = 0
            for i in range(width):
                for j in range(width):
                    pair = shifted[row, head * width + i] * v[row, head * width + j]
                    own = x[row, i, j, head]
                    rotate_modes(own, ar, ai, er, ei, b[head], pair)
                    for output in range(head, c.shape[0], heads):
                        place = output // heads * q.shape[1] + head * width + j
                        read = read_modes(c[output], own) + skip[output] * pair
                        y[row, place] += q[row, head * width + i] * read
