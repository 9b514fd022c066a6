r"""H3 between its projections, for short sequences: y = q filter2(filter1(k) v).

The diagonal SSM is the second filter, its impulse response: for some hundred tokens that is less
work than its recurrence. Heads of one channel; q, k and v are thirds of one projection, whose
tokens are ``stride`` entries apart. A whole sequence stays in the fastest caches.
"""

# mypy: ignore-errors

from stateline.ops.numba_kernels.blocks import flush, read_block, scratch, write_block
from stateline.ops.numba_kernels.jit import kernel
from stateline.ops.numba_kernels.short import TOGETHER, correlate, filter_block
from stateline.ops.numba_kernels.vector import LANES, align_stack, load, store


@kernel
def _multiply(out, a, b, rows):
    for t in range(rows):
        store(out, t * LANES, load(a, t * LANES, LANES) * load(b, t * LANES, LANES))


@kernel
def _after_zeros(count, rows, like):
    """Room for rows after ``count`` rows of zeros: all, and the part after the zeros."""
    whole = scratch((count + rows) * LANES, like)
    whole[: count * LANES] = 0
    return whole, whole[count * LANES :]


@kernel
def forward(q, k, v, taps1, taps2, y, count, length, channels, stride, start, stop):
    """Tasks ``start`` to ``stop`` of (row, channel block).

    The filters have ``count`` and ``length`` taps.
    """
    align_stack()
    blocks, rows = (channels + LANES - 1) // LANES, length + TOGETHER
    padded = blocks * LANES
    keys, fresh = _after_zeros(count - 1, rows, q)
    pairs, pair = _after_zeros(length - 1, rows, q)
    out, signal = scratch(rows * LANES, q), scratch(rows * LANES, q)
    for task in range(start, stop):
        row, channel = task // blocks, task % blocks * LANES
        lanes, place = min(LANES, channels - channel), row * length
        at = place * stride + channel
        read_block(fresh, k, at, stride, length, lanes)
        filter_block(out, keys, count - 1, -1, taps1, count, channel, padded, length, TOGETHER)
        read_block(signal, v, at, stride, length, lanes)
        _multiply(pair, out, signal, length)
        filter_block(out, pairs, length - 1, -1, taps2, length, channel, padded, length, TOGETHER)
        read_block(signal, q, at, stride, length, lanes)
        _multiply(out, out, signal, length)
        write_block(y, place * channels + channel, channels, length, lanes, out)


@kernel
def backward(
    gy, q, k, v, taps1, taps2, dq, dk, dv, dtaps1, dtaps2, count, batch, length, channels, stride,
    apart, pieces, start, stop,
):  # fmt: skip
    """Tasks of (piece of the rows, channel block); each has gradients of the taps.

    Tokens of dq, dk and dv are ``apart`` entries apart.

    Those of the taps are reversed and padded as in the backward pass of the short filter.
    """
    align_stack()
    blocks, rows = (channels + LANES - 1) // LANES, length + TOGETHER
    padded = blocks * LANES
    whole1 = (count + TOGETHER - 1) // TOGETHER * TOGETHER
    whole2 = (length + TOGETHER - 1) // TOGETHER * TOGETHER
    keys, fresh = _after_zeros(whole1 - 1, rows, q)
    pairs, pair = _after_zeros(whole2 - 1, rows, q)
    vb, qb = scratch(rows * LANES, q), scratch(rows * LANES, q)
    shifted, out = scratch(rows * LANES, q), scratch(rows * LANES, q)
    # gradients meet zeros after the last token
    gated, later = scratch((rows + length) * LANES, q), scratch((rows + length) * LANES, q)
    gated[:] = 0
    later[:] = 0
    grad1, grad2 = scratch(whole1 * LANES, q), scratch(whole2 * LANES, q)
    grad1[:] = 0
    grad2[:] = 0
    for task in range(start, stop):
        piece, channel = task // blocks, task % blocks * LANES
        lanes = min(LANES, channels - channel)
        at1, at2 = task * whole1 * LANES, task * whole2 * LANES
        dtaps1[at1 : at1 + whole1 * LANES] = 0
        dtaps2[at2 : at2 + whole2 * LANES] = 0
        for row in range(batch * piece // pieces, batch * (piece + 1) // pieces):
            at, place = row * length * stride + channel, row * length * apart + channel
            from_y = row * length * channels + channel
            read_block(fresh, k, at, stride, length, lanes)
            read_block(vb, v, at, stride, length, lanes)
            read_block(qb, q, at, stride, length, lanes)
            read_block(gated, gy, from_y, channels, length, lanes)
            filter_block(
                shifted, keys, whole1 - 1, -1, taps1, count, channel, padded, length, TOGETHER
            )
            _multiply(pair, shifted, vb, length)
            filter_block(
                out, pairs, whole2 - 1, -1, taps2, length, channel, padded, length, TOGETHER
            )
            _multiply(out, out, gated, length)
            write_block(dq, place, apart, length, lanes, out)
            _multiply(gated, gated, qb, length)
            correlate(grad2, gated, pairs, whole2, length, whole2 - 1)
            filter_block(out, gated, 0, 1, taps2, length, channel, padded, length, length)
            _multiply(later, out, vb, length)
            _multiply(out, out, shifted, length)
            write_block(dv, place, apart, length, lanes, out)
            correlate(grad1, later, keys, whole1, length, whole1 - 1)
            filter_block(out, later, 0, 1, taps1, count, channel, padded, length, length)
            write_block(dk, place, apart, length, lanes, out)
            flush(dtaps1, at1, grad1, 0, whole1 * LANES)
            flush(dtaps2, at2, grad2, 0, whole2 * LANES)
