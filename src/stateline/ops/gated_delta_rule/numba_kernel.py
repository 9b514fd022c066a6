"""One step of the gated delta rule; whole sequences go through the kernels of the delta rule."""

# mypy: ignore-errors

import numpy as np

from stateline.ops.numba_common.jit import summing_kernel


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
