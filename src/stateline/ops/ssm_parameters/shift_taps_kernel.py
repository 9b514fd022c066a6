"""Correlation of short vectors, channel by channel, in loops that LLVM vectorises.

Slices of one axis are taken, because LLVM then knows that their entries are neighbours in memory.
"""

# mypy: ignore-errors

from stateline.ops.numba_common.blocks import add_multiple, dot
from stateline.ops.numba_common.jit import summing_kernel


@summing_kernel
def forward(b, c, skip, y, start, stop):
    """Channels ``start`` to ``stop``: y[l] is the sum of b[n] c[n + l]; y starts with zeros."""
    taps = b.shape[1]
    for channel in range(start, stop):
        for n in range(taps):
            add_multiple(y[channel][: taps - n], b[channel, n], c[channel][n:])
        y[channel, 0] += skip[channel]


@summing_kernel
def backward(grad, b, c, db, dc, start, stop):
    """Gradients of b and c, which start with zeros."""
    taps = b.shape[1]
    for channel in range(start, stop):
        for n in range(taps):
            above = grad[channel][: taps - n]
            add_multiple(dc[channel][n:], b[channel, n], above)
            db[channel, n] = dot(above, c[channel][n:])
