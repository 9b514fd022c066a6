"""Blocks of time, which all kernels over whole sequences use.

Signals are flat arrays (row, time, channel). A task of a kernel is one row (or some) and ``LANES``
neighbouring channels; its time is cut into blocks whose rows of ``LANES`` numbers stay in the L1
cache.
"""

# mypy: ignore-errors

import numpy as np

from stateline.ops.numba_common.jit import kernel, summing_kernel
from stateline.ops.numba_common.vector import LANES, entry, load, store

MODES = 4
"""Modes, states or tokens that go through a block together: as many as fit into registers."""

WIDE = MODES * LANES

FLUSH = 8
"""Blocks of time after which sums are added up in float64: longer sums would lose digits."""


@kernel
def read_block(block, x, first, stride, rows, lanes):
    """Copy ``rows`` rows of channels; if fewer than ``LANES`` are left, pad with zeros."""
    if lanes == LANES:
        for t in range(rows):
            store(block, t * LANES, load(x, first + t * stride, LANES))
    else:
        for t in range(rows):
            for i in range(LANES):
                block[t * LANES + i] = x[first + t * stride + i] if i < lanes else 0


@kernel
def write_block(x, first, stride, rows, lanes, block):
    """Copy a block back."""
    if lanes == LANES:
        for t in range(rows):
            store(x, first + t * stride, load(block, t * LANES, LANES))
    else:
        for t in range(rows):
            for i in range(lanes):
                x[first + t * stride + i] = block[t * LANES + i]


@summing_kernel
def dot(x, at, y, place, count):
    """Product of two short vectors that begin at given entries."""
    total = x.dtype.type(0)
    for i in range(count):
        total += entry(x, at + i) * entry(y, place + i)
    return total


@summing_kernel
def add_multiple(y, factor, x, place):
    """Add a number times a vector that begins at a given entry."""
    for i in range(len(y)):
        y[i] += factor * entry(x, place + i)


@kernel
def scratch(size, like):
    """Memory of an array's type, aligned to a cache line, so that no vector crosses two of them."""
    room = np.empty(size + 64 // like.itemsize, like.dtype)
    first = -room.ctypes.data % 64 // like.itemsize
    return room[first : first + size]


@kernel
def flush(totals, at, parts, first, count):
    """Add sums over some blocks of time to the float64 sums over all time, and reset them."""
    for i in range(count):
        totals[at + i] += parts[first + i]
        parts[first + i] = 0


@kernel
def states_in(packed, at, x, first, modes, lanes, parts):
    """States (channel, mode, part) of some channels, as (mode group, part, WIDE).

    ``None``, and a place below 0, stand for zeros.
    """
    groups = (modes + MODES - 1) // MODES
    packed[at : at + groups * parts * WIDE] = 0
    if x is not None and first >= 0:
        for i in range(lanes):
            for n in range(modes):
                place = at + n // MODES * parts * WIDE + n % MODES * LANES + i
                for part in range(parts):
                    packed[place + part * WIDE] = x[first + (i * modes + n) * parts + part]


@kernel
def states_out(x, first, modes, lanes, parts, packed, at):
    """The inverse of ``states_in``; below 0, nothing is written."""
    for i in range(lanes if first >= 0 else 0):
        for n in range(modes):
            place = at + n // MODES * parts * WIDE + n % MODES * LANES + i
            for part in range(parts):
                x[first + (i * modes + n) * parts + part] = packed[place + part * WIDE]
