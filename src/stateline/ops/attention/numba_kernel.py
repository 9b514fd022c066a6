r"""Causal softmax attention: blocks of queries against tiles of keys.

``LANES`` queries make a vector, so that sums over keys stay inside a lane. Scores are in units of
log 2, since the kernels compute 2**x. The forward pass keeps a norm for each query, log2 of the sum
of its exponentials. The backward pass computes the weights again from the norms: with blocks of
queries for the gradient of q, with blocks of keys for dk and dv. All masks are by distance:
a query at position i sees slot j if 0 <= i - j < window.
"""

# mypy: ignore-errors

import math

import numpy as np

from stateline.ops.numba_common.jit import kernel, summing_kernel
from stateline.ops.numba_common.vector import (
    LANES,
    LOG2_E,
    align_stack,
    entry,
    exp2,
    load,
    maximum,
    minimum,
    store,
    zeros,
)

TILE = 64
"""Keys whose scores are in the fastest cache at a time."""

ROWS = 8
"""Keys that go through a block of queries together; padded rows are zero."""

HIDDEN = -1e30

EVERYTHING = 1 << 60
"""A window that hides nothing; sums of a few such numbers do not overflow."""

NOTHING = 2.0**-126
"""The value that ``exp2`` returns for a hidden score; subtracting it makes the weight zero."""

MARGIN = ROWS + LANES
"""Distances that blocks reach beyond the first and last token."""


@kernel
def _bounded(number):
    """A start or a window whose sums do not overflow."""
    return min(max(number, -EVERYTHING), EVERYTHING)


@kernel
def _pack(rows, x, first, stride, count, d, scale):
    """Rows of one head, one after the other; zeros fill the last group of ``ROWS``."""
    rows[count * d : (count + ROWS - 1) // ROWS * ROWS * d] = 0
    for t in range(count):
        for c in range(d):
            rows[t * d + c] = scale * x[first + t * stride + c]


@kernel
def _turn(block, rows, first, count, d):
    """``LANES`` rows as (entry, lane); zeros where there are fewer."""
    lanes = min(LANES, count - first)
    if lanes < LANES:
        block[:] = 0
    for lane in range(lanes):
        for c in range(d):
            block[c * LANES + lane] = rows[(first + lane) * d + c]


@kernel
def _dots(out, block, rows, first, count, d):
    """Products of rows ``first`` ... with the vectors of a block, into (row, lane)."""
    align_stack()
    for t in range(0, count, ROWS):
        at = (first + t) * d
        s0, s1, s2, s3 = zeros(out, LANES), zeros(out, LANES), zeros(out, LANES), zeros(out, LANES)
        s4, s5, s6, s7 = zeros(out, LANES), zeros(out, LANES), zeros(out, LANES), zeros(out, LANES)
        for c in range(d):
            b = load(block, c * LANES, LANES)
            s0 = s0 + entry(rows, at + c) * b
            s1 = s1 + entry(rows, at + d + c) * b
            s2 = s2 + entry(rows, at + 2 * d + c) * b
            s3 = s3 + entry(rows, at + 3 * d + c) * b
            s4 = s4 + entry(rows, at + 4 * d + c) * b
            s5 = s5 + entry(rows, at + 5 * d + c) * b
            s6 = s6 + entry(rows, at + 6 * d + c) * b
            s7 = s7 + entry(rows, at + 7 * d + c) * b
        store(out, t * LANES, s0)
        store(out, (t + 1) * LANES, s1)
        store(out, (t + 2) * LANES, s2)
        store(out, (t + 3) * LANES, s3)
        store(out, (t + 4) * LANES, s4)
        store(out, (t + 5) * LANES, s5)
        store(out, (t + 6) * LANES, s6)
        store(out, (t + 7) * LANES, s7)


@kernel
def _add(total, weights, rows, first, count, d):
    """Add rows ``first`` ..., each times its weight in each lane, to a block."""
    align_stack()
    for t in range(0, count, ROWS):
        at = (first + t) * d
        w0, w1 = load(weights, t * LANES, LANES), load(weights, (t + 1) * LANES, LANES)
        w2, w3 = load(weights, (t + 2) * LANES, LANES), load(weights, (t + 3) * LANES, LANES)
        w4, w5 = load(weights, (t + 4) * LANES, LANES), load(weights, (t + 5) * LANES, LANES)
        w6, w7 = load(weights, (t + 6) * LANES, LANES), load(weights, (t + 7) * LANES, LANES)
        for c in range(d):
            a = load(total, c * LANES, LANES) + entry(rows, at + c) * w0
            b = entry(rows, at + d + c) * w1
            a = a + entry(rows, at + 2 * d + c) * w2
            b = b + entry(rows, at + 3 * d + c) * w3
            a = a + entry(rows, at + 4 * d + c) * w4
            b = b + entry(rows, at + 5 * d + c) * w5
            a = a + entry(rows, at + 6 * d + c) * w6
            b = b + entry(rows, at + 7 * d + c) * w7
            store(total, c * LANES, a + b)


@kernel
def _by_distance(ceiling, bias, least, slope, window):
    """The highest score of a key and the bias, for all distances of at least ``least``."""
    number = bias.dtype.type
    for i in range(len(bias)):
        ceiling[i] = number(math.inf) if 0 <= least + i < window else number(HIDDEN)
        bias[i] = -slope * number(least + i)


@kernel
def _mask(scores, count, ceiling, bias, at):
    """Add the bias, and hide keys; row t and lane i have entry ``at - t + i`` of the tables."""
    align_stack()
    for t in range(count):
        score = load(scores, t * LANES, LANES) + load(bias, at - t, LANES)
        store(scores, t * LANES, minimum(score, load(ceiling, at - t, LANES)))


@kernel
def _range(position, window, slots):
    """Slots that a block of queries sees, in whole groups of rows; the block starts at position."""
    low = max(0, position - window + 1) // ROWS * ROWS
    high = (min(slots, position + LANES) + ROWS - 1) // ROWS * ROWS
    return low, high


@kernel
def _partly(first, count, position, window):
    """True unless all queries of a block see all slots of a tile."""
    return first + count - 1 > position or position + LANES - 1 - first >= window


@kernel
def _forward_block(
    block, kp, vp, scores, total, norm, ceiling, bias, position, own, slope, window, slots, d
):  # fmt: skip
    """Weighted sums of one block of queries into ``total``; norm: log2 of the sums of weights.

    ``own``: the place in the tables of slot 0 and the first query.
    """
    align_stack()
    total[:] = 0
    top, mass = zeros(total, LANES), zeros(total, LANES)
    norm[:] = HIDDEN
    top = load(norm, 0, LANES)
    low, high = _range(position, window, slots)
    for first in range(low, high, TILE):
        count = min(TILE, high - first)
        _dots(scores, block, kp, first, count, d)
        if slope != 0 or _partly(first, count, position, window):
            _mask(scores, count, ceiling, bias, own - first)
        new = top
        for t in range(count):
            new = maximum(new, load(scores, t * LANES, LANES))
        factor = exp2(top - new)
        top, mass = new, mass * factor
        for c in range(d):
            store(total, c * LANES, load(total, c * LANES, LANES) * factor)
        for t in range(count):
            weight = exp2(load(scores, t * LANES, LANES) - top) - NOTHING
            store(scores, t * LANES, weight)
            mass = mass + weight
        _add(total, scores, vp, first, count, d)
    store(norm, 0, mass)
    for lane in range(LANES):
        norm[LANES + lane] = 1 / norm[lane] if norm[lane] > 0 else 0
        norm[lane] = math.log2(norm[lane]) if norm[lane] > 0 else 0
    store(norm, 0, load(norm, 0, LANES) + top)
    share = load(norm, LANES, LANES)
    for c in range(d):
        store(total, c * LANES, load(total, c * LANES, LANES) * share)


@kernel
def _untie(x, first, stride, block, start, count, d, scale):
    """Write a block (entry, lane) back as rows of one head."""
    for lane in range(min(LANES, count - start)):
        for c in range(d):
            x[first + (start + lane) * stride + c] = scale * block[c * LANES + lane]


@kernel
def forward(
    q, k, v, y, norms, starts, slopes, windows, of_q, of_k, of_v, length, slots, heads, d,
    start, stop,
):  # fmt: skip
    """Tasks ``start`` to ``stop`` of (row, head); norms (task, query) are for ``backward``.

    Tokens of q, k and v are ``of_q``, ``of_k`` and ``of_v`` entries apart.
    """
    align_stack()
    one = q.dtype.type(1)
    padded = (slots + ROWS) * d
    kp, vp = np.empty(padded, q.dtype), np.empty(padded, q.dtype)
    qp = np.empty((length + ROWS) * d, q.dtype)
    block, total = np.empty(d * LANES, q.dtype), np.empty(d * LANES, q.dtype)
    scores, norm = np.empty(TILE * LANES, q.dtype), np.empty(2 * LANES, q.dtype)
    reach = length + slots + 2 * MARGIN + LANES
    ceiling, bias = np.empty(reach, q.dtype), np.empty(reach, q.dtype)
    scale = q.dtype.type(LOG2_E / math.sqrt(d))
    for task in range(start, stop):
        row, head = task // heads, task % heads
        slope, window = slopes[head] * q.dtype.type(LOG2_E), _bounded(windows[head])
        offset = _bounded(starts[row])
        least = offset - slots - MARGIN
        _by_distance(ceiling, bias, least, slope, window)
        _pack(kp, k, row * slots * of_k + head * d, of_k, slots, d, one)
        _pack(vp, v, row * slots * of_v + head * d, of_v, slots, d, one)
        _pack(qp, q, row * length * of_q + head * d, of_q, length, d, scale)
        for first in range(0, length, LANES):
            _turn(block, qp, first, length, d)
            position = offset + first
            _forward_block(
                block, kp, vp, scores, total, norm, ceiling, bias, position, position - least,
                slope, window, slots, d,
            )  # fmt: skip
            at = (row * length * heads + head) * d
            _untie(y, at, heads * d, total, first, length, d, one)
            for lane in range(min(LANES, length - first)):
                norms[task * length + first + lane] = norm[lane]


@kernel
def _weights(scores, grads, count, norm, delta):
    """Weights of a tile into scores, gradients of its scores into grads; lanes are queries."""
    align_stack()
    n, e = load(norm, 0, LANES), load(delta, 0, LANES)
    for t in range(count):
        weight = exp2(load(scores, t * LANES, LANES) - n) - NOTHING
        store(scores, t * LANES, weight)
        store(grads, t * LANES, weight * (load(grads, t * LANES, LANES) - e))


@kernel
def _weights_by_key(scores, grads, count, first, norms, deltas):
    """The same where lanes are keys and rows are queries."""
    align_stack()
    for t in range(count):
        weight = exp2(load(scores, t * LANES, LANES) - norms[first + t]) - NOTHING
        store(scores, t * LANES, weight)
        store(grads, t * LANES, weight * (load(grads, t * LANES, LANES) - deltas[first + t]))


@kernel
def backward(
    q, k, v, gy, y, known, dq, dk, dv, starts, slopes, windows, of_q, of_k, of_v,
    length, slots, heads, d, start, stop,
):  # fmt: skip
    """Tasks ``start`` to ``stop`` of (row, head), from the outputs and norms of ``forward``."""
    align_stack()
    one, zero = q.dtype.type(1), q.dtype.type(0)
    kp, vp = np.empty((slots + ROWS) * d, q.dtype), np.empty((slots + ROWS) * d, q.dtype)
    qp, gp = np.empty((length + ROWS) * d, q.dtype), np.empty((length + ROWS) * d, q.dtype)
    block, total = np.empty(d * LANES, q.dtype), np.empty(d * LANES, q.dtype)
    gblock, other = np.empty(d * LANES, q.dtype), np.empty(d * LANES, q.dtype)
    scores, grads = np.empty(TILE * LANES, q.dtype), np.empty(TILE * LANES, q.dtype)
    norm, delta = np.empty(LANES, q.dtype), np.empty(LANES, q.dtype)
    norms = np.zeros(length + MARGIN, q.dtype)  # read in groups of ROWS, too
    deltas = np.zeros(length + MARGIN, q.dtype)
    reach = length + slots + 2 * MARGIN + LANES
    ceiling, bias = np.empty(reach, q.dtype), np.empty(reach, q.dtype)
    root = 1 / math.sqrt(d)
    scale, back = q.dtype.type(LOG2_E * root), q.dtype.type(root)
    unscale = q.dtype.type(1 / LOG2_E)
    for task in range(start, stop):
        row, head = task // heads, task % heads
        at, stride = (row * length * heads + head) * d, heads * d
        slope, window = slopes[head] * q.dtype.type(LOG2_E), _bounded(windows[head])
        offset = _bounded(starts[row])
        least = offset - slots - MARGIN
        _by_distance(ceiling, bias, least, slope, window)
        _pack(kp, k, row * slots * of_k + head * d, of_k, slots, d, one)
        _pack(vp, v, row * slots * of_v + head * d, of_v, slots, d, one)
        _pack(qp, q, row * length * of_q + head * d, of_q, length, d, scale)
        _pack(gp, gy, at, stride, length, d, one)
        for first in range(0, length, LANES):
            _turn(block, qp, first, length, d)
            _turn(gblock, gp, first, length, d)
            position = offset + first
            for t in range(first, first + LANES):
                norms[t], deltas[t] = zero, zero
            for t in range(first, min(length, first + LANES)):
                norms[t] = known[task * length + t]
                for c in range(d):
                    deltas[t] += y[at + t * stride + c] * gp[t * d + c]
            store(delta, 0, load(deltas, first, LANES))
            store(norm, 0, load(norms, first, LANES))
            total[:] = 0
            low, high = _range(position, window, slots)
            for tile in range(low, high, TILE):
                count = min(TILE, high - tile)
                _dots(scores, block, kp, tile, count, d)
                _dots(grads, gblock, vp, tile, count, d)
                if slope != 0 or _partly(tile, count, position, window):
                    _mask(scores, count, ceiling, bias, position - tile - least)
                _weights(scores, grads, count, norm, delta)
                _add(total, grads, kp, tile, count, d)
            _untie(dq, at, stride, total, first, length, d, back)
        ceiling[:] = ceiling[::-1].copy()  # lanes are keys now, whose distances fall
        bias[:] = bias[::-1].copy()
        for first in range(0, slots, LANES):
            _turn(block, kp, first, slots, d)
            _turn(gblock, vp, first, slots, d)
            total[:] = 0
            other[:] = 0
            low = max(0, first - offset) // ROWS * ROWS
            seen = min(length, first + LANES - 1 + window - offset)
            high = (max(low, seen) + ROWS - 1) // ROWS * ROWS
            for tile in range(low, high, TILE):
                count, nearest = min(TILE, high - tile), offset + tile - first
                _dots(scores, block, qp, tile, count, d)
                _dots(grads, gblock, gp, tile, count, d)
                partly = nearest < LANES - 1 or nearest + count > window
                if slope != 0 or partly or tile + count > length:
                    _mask(scores, count, ceiling, bias, least + reach - 1 - nearest)
                _weights_by_key(scores, grads, count, tile, norms, deltas)
                _add(other, scores, gp, tile, count, d)
                _add(total, grads, qp, tile, count, d)
            key = (row * slots * heads + head) * d
            _untie(dk, key, stride, total, first, slots, d, unscale)
            _untie(dv, key, stride, other, first, slots, d, one)


@summing_kernel
def _score(q, at, k, place, d):
    """Product of a query and a key that begin at given entries."""
    total = q.dtype.type(0)
    for c in range(d):
        total += entry(q, at + c) * entry(k, place + c)
    return total


@summing_kernel
def _accumulate(total, weight, v, place):
    for c in range(len(total)):
        total[c] += weight * entry(v, place + c)


@summing_kernel
def step(
    q, k, v, y, starts, slopes, windows, of_q, of_k, of_v, length, slots, heads, d, start, stop
):
    """The same for few queries: vectors lie along the entries of a head."""
    weights, total = np.empty(slots, q.dtype), np.empty(d, q.dtype)
    scale = q.dtype.type(LOG2_E / math.sqrt(d))
    for task in range(start, stop):
        row, head = task // heads, task % heads
        slope, window = slopes[head] * q.dtype.type(LOG2_E), _bounded(windows[head])
        offset = _bounded(starts[row])
        for t in range(length):
            at, position = (row * length + t) * of_q + head * d, offset + t
            low, high = max(0, position - window + 1), min(slots, position + 1)
            first, ours = row * slots * of_k + head * d, row * slots * of_v + head * d
            top = q.dtype.type(HIDDEN)
            for j in range(low, high):
                score = scale * _score(q, at, k, first + j * of_k, d)
                weights[j] = score - slope * q.dtype.type(position - j)
                top = max(top, weights[j])
            mass = q.dtype.type(0)
            for j in range(low, high):
                weights[j] = exp2(weights[j] - top)
                mass += weights[j]
            total[:] = 0
            for j in range(low, high):
                _accumulate(total, weights[j], v, ours + j * of_v)
            for c in range(d):
                y[((row * length + t) * heads + head) * d + c] = total[c] / mass
