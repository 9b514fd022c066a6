"""Cross entropy of rows of logits."""

# mypy: ignore-errors

import math

import numpy as np

from stateline.ops.numba_common.jit import kernel, summing_kernel
from stateline.ops.numba_common.vector import LANES, LOG2_E, exp2, load, maximum, store

NOTHING = 2.0**-126
"""What ``exp2`` returns for far smaller numbers; it is subtracted, so that they become zero."""


@kernel
def _largest(x, lanes):
    """The largest entry; ``lanes`` is room for a vector."""
    vectors, top = len(x) // LANES * LANES, x[0]
    if vectors:
        best = load(x, 0, LANES)
        for i in range(LANES, vectors, LANES):
            best = maximum(best, load(x, i, LANES))
        store(lanes, 0, best)
        for i in range(LANES):
            top = max(top, lanes[i])
    for i in range(vectors, len(x)):
        top = max(top, x[i])
    return top


@summing_kernel
def _mass(x, top):
    """Sum of exp(x - top)."""
    scale, total = x.dtype.type(LOG2_E), x.dtype.type(0)
    for i in range(len(x)):
        total += exp2(scale * (x[i] - top))
    return total


@summing_kernel
def _chances(y, x, norm, factor):
    """Y = factor exp(x - norm)."""
    scale, nothing = x.dtype.type(LOG2_E), x.dtype.type(NOTHING)
    for i in range(len(x)):
        y[i] = factor * (exp2(scale * (x[i] - norm)) - nothing)


@kernel
def forward(x, targets, norms, losses, start, stop):
    """Losses of rows ``start`` to ``stop``, and logarithms of the sums of exponentials.

    A row without a target has no loss.
    """
    lanes = np.empty(LANES, x.dtype)
    for row in range(start, stop):
        losses[row] = 0
        if targets[row] >= 0:
            top = _largest(x[row], lanes)
            norm = top + math.log(np.float64(_mass(x[row], top)))
            norms[row], losses[row] = norm, norm - x[row, targets[row]]


@kernel
def backward(x, targets, norms, found, grad, start, stop):
    """The gradient of x, for that of the sum of the losses."""
    for row in range(start, stop):
        if targets[row] < 0:
            found[row] = 0
        else:
            _chances(found[row], x[row], norms[row], grad[0])
            found[row, targets[row]] -= grad[0]
