r"""Causal softmax attention: blocks of queries against tiles of keys.

``LANES`` queries make a vector, so that sums over keys stay inside a lane. Scores are in units of
log 2, since the kernels compute 2**x. The forward pass keeps a norm for each query, log2 of the sum
of its exponentials. The backward pass computes the weights of a tile once more from the norms; the
gradients of its keys and values are sums over queries, whose vectors lie along the entries of a
head. A query at position i sees slot j if 0 <= i - j < window, and with ``firsts`` no slot before
its entry there: rows may hold several documents. A query that sees no slot gives zero.

Keys by distance (``keys``, shared by all heads) are multiplied like other keys, for all distances
of a tile; the products are then read along diagonals.
"""

# mypy: ignore-errors

import math

import numpy as np

from stateline.ops.numba_common.blocks import add_multiple, dot, scratch
from stateline.ops.numba_common.jit import kernel, summing_kernel
from stateline.ops.numba_common.vector import (
    LANES,
    LOG2_E,
    align_stack,
    entry,
    exp2,
    fold,
    load,
    load_column,
    load_rows,
    maximum,
    minimum,
    put,
    store,
    store_rows,
    transposed,
    zeros,
)
from stateline.ops.positions import NEAR

TILE = 64
"""Keys of a tile, whose scores fit into the L1 cache."""

ROWS = 8
"""Keys that go through a block of queries together, as one vector of ``ALL`` lanes.

Padded rows are zero.
"""

ALL = ROWS * LANES

PADDING = max(ROWS, LANES)
"""Packed rows are filled up to a multiple of this number."""

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
def _up(number, step):
    """The next multiple of ``step``."""
    return (number + step - 1) // step * step


@kernel
def _pack(rows, x, first, stride, count, d, scale):
    """Rows of one head, filled with zeros to whole vectors, one after the other."""
    wide, whole = _up(d, LANES), d // LANES * LANES
    rows[count * wide : _up(count, PADDING) * wide] = 0
    for t in range(count):
        at = first + t * stride
        for c in range(0, whole, LANES):
            store(rows, t * wide + c, scale * load(x, at + c, LANES))
        if whole < wide:
            store(rows, t * wide + whole, zeros(rows, LANES))
            for c in range(whole, d):
                rows[t * wide + c] = scale * entry(x, at + c)


@kernel
def _unpack(x, first, stride, rows, count, d, scale):
    """Write packed rows back."""
    wide, whole = _up(d, LANES), d // LANES * LANES
    for t in range(count):
        at = first + t * stride
        for c in range(0, whole, LANES):
            store(x, at + c, scale * load(rows, t * wide + c, LANES))
        for c in range(whole, d):
            x[at + c] = scale * entry(rows, t * wide + c)


@kernel
def _turn(block, rows, first, wide):
    """``LANES`` packed rows as (entry, lane)."""
    align_stack()
    for c in range(0, wide, LANES):
        x = load_rows(rows, first * wide + c, wide, LANES)
        store_rows(block, c * LANES, LANES, transposed(x))


@kernel
def _turn_back(rows, first, wide, block):
    """The inverse of ``_turn``."""
    align_stack()
    for c in range(0, wide, LANES):
        x = load_rows(block, c * LANES, LANES, LANES)
        store_rows(rows, first * wide + c, wide, transposed(x))


@kernel
def _multiply(out, to, apart, x, at, stride, vectors, place, between, count, depth, more):
    """Rows of numbers x times vectors, summed over ``depth``; with ``more``, added to ``out``.

    Row t of x begins at ``at + t * stride``, vector i at ``place + i * between``, and sum t at
    ``to + t * apart``.
    """
    align_stack()
    for t in range(0, count, ROWS):
        sums, row = zeros(out, ALL), at + t * stride
        if more:
            sums = load_rows(out, to + t * apart, apart, ROWS)
        for i in range(depth):
            b = load(vectors, place + i * between, LANES)
            sums = sums + load_column(x, row + i, stride, ROWS) * b
        store_rows(out, to + t * apart, apart, sums)


@kernel
def _dots(out, block, rows, first, count, d):
    """Products of rows ``first`` ... with the vectors of a block, into (row, lane)."""
    wide = _up(d, LANES)
    _multiply(out, 0, LANES, rows, first * wide, wide, block, 0, LANES, count, d, False)


@kernel
def _spread(sums, at, weights, rows, first, count, wide):
    """Add to sums ``at`` ... the packed rows of a block of queries, each times its weight."""
    for c in range(0, wide, LANES):
        place = first * wide + c
        _multiply(
            sums, at * wide + c, wide, weights, 0, LANES, rows, place, wide, count, LANES, True
        )


@kernel
def _add(total, weights, rows, first, count, d):
    """Add rows ``first`` ..., each times its weight in each lane, to a block."""
    align_stack()
    wide = _up(d, LANES)
    for t in range(0, count, ROWS):
        at, w = (first + t) * wide, load(weights, t * LANES, ALL)
        for c in range(d):
            added = fold(load_column(rows, at + c, wide, ROWS) * w)
            store(total, c * LANES, load(total, c * LANES, LANES) + added)


@kernel
def _by_distance(ceiling, bias, least, slope, window):
    """Fill tables with the upper bound of a score and its bias, for distances ``least``, ..."""
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
def _range(position, window, slots, firsts, query, count):
    """Slots that a block of queries sees, in whole groups of rows; the block starts at position.

    Its ``count`` queries have the entries ``query``, ... of ``firsts``.
    """
    low = max(0, position - window + 1)
    if firsts is not None:
        earliest = slots
        for lane in range(min(LANES, count)):
            earliest = min(earliest, firsts[query + lane])
        low = max(low, earliest)
    low = low // ROWS * ROWS
    high = (min(slots, position + LANES) + ROWS - 1) // ROWS * ROWS
    return low, high


@kernel
def _partly(first, count, position, window):
    """True unless all queries of a block see all slots of a tile."""
    return first + count - 1 > position or position + LANES - 1 - first >= window


@kernel
def _hide(scores, low, rows, firsts, query, count):
    """Hide the slots of a tile (at ``low``, ...) before the first slot that each query sees."""
    if firsts is not None:
        for lane in range(min(LANES, count)):
            for t in range(min(rows, firsts[query + lane] - low)):
                scores[t * LANES + lane] = HIDDEN


@kernel
def _pack_distances(rows, keys, d):
    """Keys by distance as packed rows from distance ``-MARGIN`` on, with zeros on both sides."""
    wide = _up(d, LANES)
    rows[: MARGIN * wide] = 0
    rows[(MARGIN + len(keys) // d) * wide :] = 0
    _pack(rows[MARGIN * wide :], keys, 0, d, len(keys) // d, d, keys.dtype.type(1))


@kernel
def _distances(count):
    """Distances between the queries of a block and ``count`` slots, in whole groups of rows."""
    return _up(count + LANES, ROWS)


@kernel
def _add_distances(scores, products, block, rows, least, count, d):
    """Add to the scores of a tile those of keys by distance, of which ``least`` is the first."""
    _dots(products, block, rows, least + MARGIN, _distances(count), d)
    for t in range(count):
        for lane in range(LANES):
            scores[t * LANES + lane] += products[(count - 1 - t + lane) * LANES + lane]


@kernel
def _sort_distances(products, scores, count):
    """Gradients of the scores of a tile, by distance: the inverse of reading along diagonals."""
    products[: _distances(count) * LANES] = 0
    for t in range(count):
        for lane in range(LANES):
            products[(count - 1 - t + lane) * LANES + lane] = scores[t * LANES + lane]


@kernel
def _forward_block(
    block, kp, vp, scores, total, norm, ceiling, bias, position, own, slope, window, slots, d,
    firsts, query, queries, keys, apart, products,
):  # fmt: skip
    """Weighted sums of one block of queries into ``total``; norm: log2 of sums of exponentials.

    ``own``: the place in the tables of slot 0 and the first query.
    """
    align_stack()
    total[:] = 0
    top, mass = zeros(total, LANES), zeros(total, LANES)
    norm[:] = HIDDEN / 2  # above hidden scores, which so weigh nothing where all are hidden
    top = load(norm, 0, LANES)
    low, high = _range(position, window, slots, firsts, query, queries)
    for first in range(low, high, TILE):
        count = min(TILE, high - first)
        _dots(scores, block, kp, first, count, d)
        if keys is not None:
            _add_distances(scores, products, block, apart, position - first - count + 1, count, d)
        if slope != 0 or _partly(first, count, position, window):
            _mask(scores, count, ceiling, bias, own - first)
        _hide(scores, first, count, firsts, query, queries)
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
def forward(
    q, k, v, y, norms, starts, slopes, windows, firsts, of_q, of_k, of_v, length, slots, heads, d,
    group, keys, start, stop,
):  # fmt: skip
    """Tasks ``start`` to ``stop`` of (row, head); norms (task, query) are for ``backward``.

    Tokens of q, k and v are ``of_q``, ``of_k`` and ``of_v`` entries apart. Each ``group`` of heads
    shares keys and values.
    """
    align_stack()
    one, wide = q.dtype.type(1), _up(d, LANES)
    room = _up(slots, PADDING) * wide
    kp, vp = scratch(room, q), scratch(room, q)
    rows = scratch(_up(length, PADDING) * wide, q)  # queries, then outputs
    block, total = scratch(wide * LANES, q), scratch(wide * LANES, q)
    scores, norm = scratch(TILE * LANES, q), scratch(2 * LANES, q)
    apart = products = scratch(0, q)
    if keys is not None:
        apart = scratch((len(keys) // d + 3 * MARGIN) * wide, q)
        products = scratch(_distances(TILE) * LANES, q)
        _pack_distances(apart, keys, d)
    reach = length + slots + 2 * MARGIN + LANES
    ceiling, bias = np.empty(reach, q.dtype), np.empty(reach, q.dtype)
    scale = q.dtype.type(LOG2_E / math.sqrt(d))
    for task in range(start, stop):
        row, head = task // heads, task % heads
        slope, window = slopes[head] * q.dtype.type(LOG2_E), _bounded(windows[head])
        offset = _bounded(starts[row])
        least = offset - slots - MARGIN
        _by_distance(ceiling, bias, least, slope, window)
        _pack(kp, k, row * slots * of_k + head // group * d, of_k, slots, d, one)
        _pack(vp, v, row * slots * of_v + head // group * d, of_v, slots, d, one)
        _pack(rows, q, row * length * of_q + head * d, of_q, length, d, scale)
        for first in range(0, length, LANES):
            _turn(block, rows, first, wide)
            position = offset + first
            _forward_block(
                block, kp, vp, scores, total, norm, ceiling, bias, position, position - least,
                slope, window, slots, d, firsts, row * length + first, length - first, keys, apart,
                products,
            )  # fmt: skip
            _turn_back(rows, first, wide, total)
            for lane in range(min(LANES, length - first)):
                norms[task * length + first + lane] = norm[lane]
        _unpack(y, (row * length * heads + head) * d, heads * d, rows, length, d, one)


@kernel
def _weights(scores, grads, count, norms, deltas, first):
    """Weights of a tile into scores, gradients of its scores into grads."""
    align_stack()
    n, e = load(norms, first, LANES), load(deltas, first, LANES)
    for t in range(count):
        weight = exp2(load(scores, t * LANES, LANES) - n) - NOTHING
        store(scores, t * LANES, weight)
        store(grads, t * LANES, weight * (load(grads, t * LANES, LANES) - e))


@kernel
def backward(
    q, k, v, gy, y, known, dq, dk, dv, dkeys, starts, slopes, windows, firsts, of_q, of_k, of_v,
    length, slots, heads, d, group, keys, start, stop,
):  # fmt: skip
    """Tasks ``start`` to ``stop`` of (row, head), from the outputs and norms of ``forward``.

    Every head has its own gradients of keys and values, every task its own of keys by distance.
    """
    align_stack()
    one, wide = q.dtype.type(1), _up(d, LANES)
    size, queries = wide * LANES, _up(length, PADDING) * wide
    room = _up(slots, PADDING) * wide
    kp, vp, qp, gp = scratch(room, q), scratch(room, q), scratch(queries, q), scratch(queries, q)
    blocks, gblocks, totals = scratch(queries, q), scratch(queries, q), scratch(queries, q)
    ksums, vsums = scratch(TILE * wide, q), scratch(TILE * wide, q)
    scores, grads = scratch(TILE * LANES, q), scratch(TILE * LANES, q)
    norms = np.zeros(_up(length, LANES), q.dtype)
    deltas = np.zeros(_up(length, LANES), q.dtype)
    apart = products = sums = scratch(0, q)
    if keys is not None:
        apart = scratch((len(keys) // d + 3 * MARGIN) * wide, q)
        products, sums = scratch(_distances(TILE) * LANES, q), scratch(len(apart), q)
        _pack_distances(apart, keys, d)
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
        _pack(kp, k, row * slots * of_k + head // group * d, of_k, slots, d, one)
        _pack(vp, v, row * slots * of_v + head // group * d, of_v, slots, d, one)
        _pack(qp, q, row * length * of_q + head * d, of_q, length, d, scale)
        _pack(gp, gy, at, stride, length, d, one)
        for t in range(length):
            norms[t] = known[task * length + t]
            deltas[t] = dot(y, at + t * stride, gp, t * wide, d)
        for first in range(0, length, LANES):
            _turn(blocks[first * wide :], qp, first, wide)
            _turn(gblocks[first * wide :], gp, first, wide)
        totals[:] = 0
        sums[:] = 0
        for tile in range(0, slots, TILE):
            ksums[:] = 0
            vsums[:] = 0
            for first in range(max(0, tile - offset) // LANES * LANES, length, LANES):
                position = offset + first
                query, queries = row * length + first, length - first
                low, high = _range(position, window, slots, firsts, query, queries)
                low, high = max(low, tile), min(high, tile + TILE)
                count = high - low
                if count <= 0:
                    continue
                here = first * wide
                _dots(scores, blocks[here : here + size], kp, low, count, d)
                _dots(grads, gblocks[here : here + size], vp, low, count, d)
                nearest = position - low - count + 1
                if keys is not None:
                    block = blocks[here : here + size]
                    _add_distances(scores, products, block, apart, nearest, count, d)
                if slope != 0 or _partly(low, count, position, window):
                    _mask(scores, count, ceiling, bias, position - low - least)
                _hide(scores, low, count, firsts, query, queries)
                _weights(scores, grads, count, norms, deltas, first)
                _add(totals[here : here + size], grads, kp, low, count, d)
                _spread(vsums, low - tile, scores, gp, first, count, wide)
                _spread(ksums, low - tile, grads, qp, first, count, wide)
                if keys is not None:
                    many = _distances(count)
                    _sort_distances(products, grads, count)
                    _add(totals[here : here + size], products, apart, nearest + MARGIN, many, d)
                    _spread(sums, nearest + MARGIN, products, qp, first, many, wide)
            count, key = min(TILE, slots - tile), ((row * slots + tile) * heads + head) * d
            _unpack(dk, key, stride, ksums, count, d, unscale)
            _unpack(dv, key, stride, vsums, count, d, one)
        for first in range(0, length, LANES):
            _turn_back(qp, first, wide, totals[first * wide :])
        _unpack(dq, at, stride, qp, length, d, back)
        if keys is not None:
            many = len(keys) // d
            _unpack(dkeys, task * many * d, d, sums[MARGIN * wide :], many, d, unscale)


@summing_kernel
def step(
    q, k, v, y, starts, slopes, windows, firsts, of_q, of_k, of_v, length, slots, heads, d, group,
    soft_cap, start, stop,
):  # fmt: skip
    """The forward pass for few queries of one document; vectors lie along the entries of a head.

    Each ``group`` of heads shares keys and values. A soft cap of 0 means none. No query of a row
    sees a slot before the row's entry of ``firsts``; one that sees none gives zero.
    """
    weights, total = np.empty(slots, q.dtype), np.empty(d, q.dtype)
    scale, cap = q.dtype.type(LOG2_E / math.sqrt(d)), q.dtype.type(LOG2_E * soft_cap)
    for task in range(start, stop):
        row, head = task // heads, task % heads
        slope, window = slopes[head] * q.dtype.type(LOG2_E), _bounded(windows[head])
        offset = _bounded(starts[row])
        for t in range(length):
            at, position = (row * length + t) * of_q + head * d, offset + t
            low, high = max(0, position - window + 1), min(slots, position + 1)
            if firsts is not None:
                low = max(low, firsts[row])
            first = row * slots * of_k + head // group * d
            ours = row * slots * of_v + head // group * d
            top = q.dtype.type(HIDDEN)
            for j in range(low, high):
                score = scale * dot(q, at, k, first + j * of_k, d)
                if cap > 0:
                    score = cap * math.tanh(score / cap)
                weights[j] = score - slope * q.dtype.type(position - j)
                top = max(top, weights[j])
            mass = q.dtype.type(0)
            for j in range(low, high):
                weights[j] = exp2(weights[j] - top)
                mass += weights[j]
            total[:] = 0
            for j in range(low, high):
                add_multiple(total, weights[j], v, ours + j * of_v)
            share = 1 / mass if mass > 0 else mass
            for c in range(d):
                y[((row * length + t) * heads + head) * d + c] = total[c] * share


@kernel
def _turned(y, to, x, at, cos, sin, d):
    """Write a vector with its first pairs of entries rotated."""
    pairs = len(cos)
    for i in range(pairs):
        first, second = x[at + i], x[at + pairs + i]
        put(y, to + i, first * cos[i] - second * sin[i])
        put(y, to + pairs + i, first * sin[i] + second * cos[i])
    for i in range(2 * pairs, d):
        put(y, to + i, x[at + i])


@kernel
def append(q, k, v, keys, values, turned, positions, frequency, slots, heads, kv_heads, d):
    """Rotate queries and keys of one token per row, and write keys and values into its slot."""
    pairs, number = len(frequency), q.dtype.type
    cos, sin = np.empty(pairs, q.dtype), np.empty(pairs, q.dtype)
    for row in range(len(positions)):
        position = positions[row]
        for i in range(pairs):
            angle = number(position) * frequency[i]
            if position >= NEAR:
                angle = number(float(position) * float(frequency[i]) % (2 * math.pi))
            cos[i], sin[i] = math.cos(angle), math.sin(angle)
        for head in range(heads):
            at = (row * heads + head) * d
            _turned(turned, at, q, at, cos, sin, d)
        for head in range(kv_heads):
            at, slot = (row * kv_heads + head) * d, ((row * slots + position) * kv_heads + head) * d
            _turned(keys, slot, k, at, cos, sin, d)
            for i in range(d):
                put(values, slot + i, v[at + i])
