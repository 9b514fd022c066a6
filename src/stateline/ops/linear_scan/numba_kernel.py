"""Linear scan: h = f h + b, channel by channel.

Signals are flat (row, time, channel), and states flat (row, channel); a task is a block of channels
of a row.
"""

# mypy: ignore-errors

from stateline.ops.numba_common.jit import kernel
from stateline.ops.numba_common.vector import LANES, entry, load, store

WIDTH = 4 * LANES
"""Channels of a task: neighbours are processed together, since memory access is then faster."""


@kernel
def _channels(task, channels):
    """Row of a task, its first channel, the end of its whole vectors, and the end."""
    blocks = -(-channels // WIDTH)
    first = task % blocks * WIDTH
    end = min(first + WIDTH, channels)
    return task // blocks, first, end - (end - first) % LANES, end


@kernel
def forward(f, b, h, y, length, channels, start, stop):
    """All states into y; the states h change in place."""
    for task in range(start, stop):
        row, first, vectors, end = _channels(task, channels)
        held = row * channels
        for t in range(length):
            at = (row * length + t) * channels
            for c in range(first, vectors, LANES):
                new = load(f, at + c, LANES) * load(h, held + c, LANES) + load(b, at + c, LANES)
                store(h, held + c, new)
                store(y, at + c, new)
            for c in range(vectors, end):
                h[held + c] = entry(f, at + c) * entry(h, held + c) + entry(b, at + c)
                y[at + c] = entry(h, held + c)


@kernel
def backward(grad, f, y, before, g, df, db, length, channels, start, stop):
    """Gradients of f and b, from the states y and the state before them.

    g enters as the gradient of the last state, and leaves as the gradient of ``before``.
    """
    for task in range(start, stop):
        row, first, vectors, end = _channels(task, channels)
        held = row * channels
        for back in range(length):
            at = (row * length + length - 1 - back) * channels
            last = back == length - 1
            earlier, place = (before, held) if last else (y, at - channels)
            for c in range(first, vectors, LANES):
                new = load(grad, at + c, LANES) + load(g, held + c, LANES)
                store(db, at + c, new)
                store(df, at + c, new * load(earlier, place + c, LANES))
                store(g, held + c, new * load(f, at + c, LANES))
            for c in range(vectors, end):
                new = entry(grad, at + c) + entry(g, held + c)
                db[at + c] = new
                df[at + c] = new * entry(earlier, place + c)
                g[held + c] = new * entry(f, at + c)
