"""One input of short filters, whose latest inputs change in place."""

# mypy: ignore-errors

from stateline.ops.numba_common.jit import summing_kernel
from stateline.ops.numba_common.vector import LANES, entry, load, store


@summing_kernel
def filter_advance_row(y, u, weights, past, start, stop):
    """Filter channels ``start`` to ``stop`` of one row; the oldest input leaves ``past``.

    Weights and past are flat; the entries of the oldest input come first.
    """
    channels = len(u)
    held = len(past) // channels * channels
    vectors = start + (stop - start) // LANES * LANES
    for i in range(start, vectors, LANES):
        newest = load(u, i, LANES)
        total = load(weights, held + i, LANES) * newest
        for at in range(i, held, channels):
            total = total + load(weights, at, LANES) * load(past, at, LANES)
        for at in range(i, held - channels, channels):
            store(past, at, load(past, at + channels, LANES))
        if held:
            store(past, held - channels + i, newest)
        store(y, i, total)
    for i in range(vectors, stop):
        total = entry(weights, held + i) * u[i]
        for at in range(i, held, channels):
            total += entry(weights, at) * entry(past, at)
            past[at] = entry(past, at + channels) if at + channels < held else u[i]
        y[i] = total


@summing_kernel
def filter_advance(u, weights, past, y, start, stop):
    """Rows ``start`` to ``stop`` of a filter; its taps begin with the tap of the oldest input."""
    taps = weights.reshape(-1)
    for row in range(start, stop):
        filter_advance_row(y[row], u[row], taps, past[row].reshape(-1), 0, u.shape[1])
