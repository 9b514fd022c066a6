"""Correlation of short vectors, channel by channel, in loops that LLVM vectorises.

Slices of one axis are taken, because LLVM then knows that their entries are neighbours in memory.
"""

# mypy: ignore-errors

from stateline.ops.numba_common.jit import summing_kernel


@summing_kernel
def _add_products(y, x, factor):
    """Add a vector times a number."""
    for i in range(len(y)):
        y[i] += factor * x[i]


@summing_kernel
def _dot(x, y):
    total = x.dtype.type(0)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@summing_kernel
def forward(b, c, skip, y, start, stop):
    """Channels ``start`` to ``stop``: y[l] is the sum of b[n] c[n + l]; y starts with zeros."""
    taps = b.shape[1]
    for channel in range(start, stop):
        for n in range(taps):
            _add_products(y[channel][: taps - n], c[channel][n:], b[channel, n])
        y[channel, 0] += skip[channel]


@summing_kernel
def backward(grad, b, c, db, dc, start, stop):
    """Gradients of b and c, which start with zeros."""
    taps = b.shape[1]
    for channel in range(start, stop):
        for n in range(taps):
            above = grad[channel][: taps - n]
            _add_products(dc[channel][n:], above, b[channel, n])
            db[channel, n] = _dot(above, c[channel][n:])
