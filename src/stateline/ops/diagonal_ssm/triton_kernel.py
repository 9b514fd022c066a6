r"""State passing: a diagonal state space model in blocks of T inputs, by matrix products.

With the block's inputs U (rows), its outputs Y and the state X before it,

.. math:: Y = U K + X\,O, \qquad X' = a^T X + U I,

where K is the triangular Toeplitz matrix of the taps, O reads the state and I drives it. A program
handles ROWS blocks of one channel at once, and carries the state on to the next ROWS blocks. The
states inside are found by doubling: after step s every row has summed up 2s rows. Complex numbers
are planes. Rows move by products with a shifted unit matrix, for registers cannot be shifted.

With GATED the input of the model is ``filter(k) * v`` and its output is multiplied by q (H3).

With RESETS, times affect later times of their document only. ``numbers`` (row, length) counts the
documents that have begun; it is 0 before the signal. A state passes a block, or the blocks between
two rows, if the number does not change there. Inside a block, each document is one masked product.

Tables per channel: ``taps (T,)``, ``into (2, T, N)``, ``out (2, N, T)`` and
``leap (2, ROWS + 1, N)``, the powers 0, T, ..., ROWS T of the transition.
"""

import triton
import triton.language as tl

from stateline.ops.triton_common.selection import dot, times


@triton.jit
def shift(x, BY: tl.constexpr, ROWS: tl.constexpr):
    """Row r of the result is row r - BY of x, or zero."""
    row = tl.arange(0, ROWS)
    matrix = (row[None, :] == row[:, None] + BY).to(tl.float32)
    return tl.trans(dot(tl.trans(x), matrix, "tf32x3"))


@triton.jit
def load_rows(base, start, length, ROWS: tl.constexpr, T: tl.constexpr):
    """Inputs ``start``, ... as ROWS blocks of T; zeros outside of the signal."""
    at = start + tl.arange(0, ROWS)[:, None] * T + tl.arange(0, T)[None, :]
    return tl.load(base + at, mask=(at >= 0) & (at < length), other=0.0).to(tl.float32)


@triton.jit
def store_rows(base, x, start, length, ROWS: tl.constexpr, T: tl.constexpr):
    """The inverse of ``load_rows``."""
    at = start + tl.arange(0, ROWS)[:, None] * T + tl.arange(0, T)[None, :]
    tl.store(base + at, x, mask=at < length)


@triton.jit
def load_matrix(base, M: tl.constexpr, N: tl.constexpr):
    """A contiguous matrix (M, N)."""
    return tl.load(base + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])


@triton.jit
def toeplitz(taps, offset, count, T: tl.constexpr):
    """Matrix whose entry (j, i) is tap i - j + offset, zero if there is no such tap."""
    lag = tl.arange(0, T)[None, :] - tl.arange(0, T)[:, None] + offset
    return tl.load(taps + lag, mask=(lag >= 0) & (lag < count), other=0.0)


@triton.jit
def document(numbers, at, length):
    """Numbers of the documents at these times; after the signal, that of the last document."""
    return tl.load(numbers + tl.minimum(at, length - 1), mask=at >= 0, other=0)


@triton.jit
def documents(numbers, start, late, length, ROWS: tl.constexpr, T: tl.constexpr):
    """Numbers of the documents at the times that begin at ``start - late``, in ROWS blocks of T.

    In row r, they are relative to the number at the time just before ``start + r T``.
    """
    begin = start + tl.arange(0, ROWS)[:, None] * T
    at = begin - late + tl.arange(0, T)[None, :]
    return document(numbers, at, length) - document(numbers, begin - 1, length)


@triton.jit
def at_the_end(
    u, numbers, start, length, RESETS: tl.constexpr, ROWS: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """Numbers of the documents at times and at their blocks' ends; inputs that reach these ends."""
    own, end, left = 0, 0, u
    if RESETS:
        own = documents(numbers, start, 0, length, ROWS, T)
        end = tl.max(own, axis=1)[:, None]
        left = tl.where(own == end, u, 0.0)
    return own, end, left


@triton.jit
def within(x, matrix, sources, own, RESETS: tl.constexpr, PRECISION: tl.constexpr):
    """Product with a matrix.

    With RESETS, a time of x counts for a time of the result if both have the same number, which is
    not negative.
    """
    if RESETS:
        total = tl.zeros_like(own).to(tl.float32)
        for number in range(tl.max(tl.maximum(sources, own)) + 1):
            one = tl.where(sources == number, x, 0.0)
            part = dot(one, matrix, PRECISION)
            total += tl.where(own == number, part, 0.0)
    else:
        total = dot(x, matrix, PRECISION)
    return total


@triton.jit
def correlated(x, y, sources, own, RESETS: tl.constexpr, PRECISION: tl.constexpr):
    """Gradient of the matrix of ``within``, from its input and the gradient of its result."""
    if RESETS:
        total = tl.zeros((x.shape[1], y.shape[1]), tl.float32)
        for number in range(tl.max(tl.maximum(sources, own)) + 1):
            one = tl.trans(tl.where(sources == number, x, 0.0))
            total += tl.dot(one, tl.where(own == number, y, 0.0), input_precision=PRECISION)
    else:
        total = tl.dot(tl.trans(x), y, input_precision=PRECISION)
    return total


@triton.jit
def filtered(
    k, past, weights, numbers, start, length,
    COUNT: tl.constexpr, BACK: tl.constexpr, RESETS: tl.constexpr,
    ROWS: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys after a filter of COUNT weights; ``past`` holds the COUNT - 1 keys before the signal."""
    own = documents(numbers, start, 0, length, ROWS, T) if RESETS else 0
    total = tl.zeros((ROWS, T), tl.float32)
    for block in tl.static_range(BACK + 1):
        begin = start - block * T
        at = begin + tl.arange(0, ROWS)[:, None] * T + tl.arange(0, T)[None, :]
        early = (at < 0) & (at >= 1 - COUNT)
        keys = load_rows(k, begin, length, ROWS, T)
        keys += tl.load(past + at + (COUNT - 1), mask=early, other=0.0).to(tl.float32)
        sources = documents(numbers, start, block * T, length, ROWS, T) if RESETS else 0
        band = toeplitz(weights, block * T, COUNT, T)
        total += within(keys, band, sources, own, RESETS, PRECISION)
    return total


@triton.jit
def leaps(leap, rows, ROWS: tl.constexpr, N: tl.constexpr):
    """Powers of the transition for these rows: two planes."""
    at = rows[:, None] * N + tl.arange(0, N)[None, :]
    return tl.load(leap + at), tl.load(leap + (ROWS + 1) * N + at)


@triton.jit
def sums(
    x_re, x_im, carry_re, carry_im, leap, numbers, start, length,
    STEP: tl.constexpr, RESETS: tl.constexpr,
    ROWS: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Inclusive sums over the rows, decaying by a^T per row, and exclusive ones.

    STEP 1 sums forward from ``carry``, the states after the rows' blocks; STEP -1 backward, the
    gradients of the states before them, with the conjugate of the transition.
    """
    row = tl.arange(0, ROWS)
    at = start + row * T + ((T - 1) if STEP == 1 else -1)
    for level in tl.static_range(4):  # ROWS = 16
        a_re, a_im = leaps(leap, row * 0 + (1 << level), ROWS, N)
        a_im *= STEP
        s_re = shift(x_re, (1 << level) * STEP, ROWS)
        s_im = shift(x_im, (1 << level) * STEP, ROWS)
        if RESETS:
            other = document(numbers, at - (1 << level) * STEP * T, length)
            same = (other == document(numbers, at, length))[:, None]
            s_re, s_im = tl.where(same, s_re, 0.0), tl.where(same, s_im, 0.0)
        x_re, x_im = x_re + a_re * s_re - a_im * s_im, x_im + a_re * s_im + a_im * s_re
    first = row if STEP == 1 else (ROWS - 1 - row)  # rows between this one and the carried one
    a_re, a_im = leaps(leap, first + 1, ROWS, N)
    a_im *= STEP
    c_re, c_im = carry_re[None, :], carry_im[None, :]
    d_re, d_im = a_re * c_re - a_im * c_im, a_re * c_im + a_im * c_re
    if RESETS:
        other = document(numbers, at - (first + 1) * STEP * T, length)
        same = (other == document(numbers, at, length))[:, None]
        d_re, d_im = tl.where(same, d_re, 0.0), tl.where(same, d_im, 0.0)
    x_re, x_im = x_re + d_re, x_im + d_im
    begins = (first == 0)[:, None]
    before_re = shift(x_re, STEP, ROWS) + tl.where(begins, c_re, 0.0)
    before_im = shift(x_im, STEP, ROWS) + tl.where(begins, c_im, 0.0)
    return x_re, x_im, before_re, before_im


@triton.jit
def pick(x, row, ROWS: tl.constexpr):
    """One row of x as a vector; zeros if there is no such row."""
    return tl.sum(tl.where((tl.arange(0, ROWS) == row)[:, None], x, 0.0), axis=0)


@triton.jit
def forward(
    q, k, v, past, weights, taps, into, out, leap, first, numbers,
    y, last, tail, carries, length, batch_stride, channel_stride, channels,
    COUNT: tl.constexpr, BACK: tl.constexpr, GATED: tl.constexpr, RESETS: tl.constexpr,
    OUTPUT: tl.constexpr,
    ROWS: tl.constexpr, T: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs, state before the last block and its inputs; without OUTPUT, the carried states."""
    channel, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    signal = batch * batch_stride + channel * channel_stride
    line = batch * channels + channel
    taps += channel * T
    into += channel * 2 * T * N
    out += channel * 2 * T * N
    leap += channel * 2 * (ROWS + 1) * N
    numbers += batch * length
    mode = tl.arange(0, N)
    x_re = tl.load(first + line * 2 * N + mode)
    x_im = tl.load(first + line * 2 * N + N + mode)
    into_re, into_im = load_matrix(into, T, N), load_matrix(into + T * N, T, N)
    blocks = tl.cdiv(length, T)
    spans = tl.cdiv(blocks, ROWS)
    for span in range(spans):
        start = span * ROWS * T
        u = load_rows(v + signal, start, length, ROWS, T)
        if GATED:
            u *= filtered(
                k + signal, past + line * (COUNT - 1), weights + channel * COUNT, numbers,
                start, length, COUNT, BACK, RESETS, ROWS, T, PRECISION,
            )  # fmt: skip
        own, end, left = at_the_end(u, numbers, start, length, RESETS, ROWS, T)
        s_re = tl.dot(left, into_re, input_precision=PRECISION)
        s_im = tl.dot(left, into_im, input_precision=PRECISION)
        after_re, after_im, before_re, before_im = sums(
            s_re, s_im, x_re, x_im, leap, numbers, start, length, 1, RESETS, ROWS, T, N
        )
        if OUTPUT:
            o = tl.dot(before_re, load_matrix(out, N, T), input_precision=PRECISION)
            o += tl.dot(before_im, load_matrix(out + N * T, N, T), input_precision=PRECISION)
            if RESETS:
                o = tl.where(own == 0, o, 0.0)
                before_re = tl.where(end == 0, before_re, 0.0)
                before_im = tl.where(end == 0, before_im, 0.0)
            o += within(u, toeplitz(taps, 0, T, T), own, own, RESETS, PRECISION)
            if GATED:
                o *= load_rows(q + signal, start, length, ROWS, T)
            store_rows(y + line * length, o, start, length, ROWS, T)
            if span == spans - 1:
                row = (blocks - 1) % ROWS
                tl.store(last + line * 2 * N + mode, pick(before_re, row, ROWS))
                tl.store(last + line * 2 * N + N + mode, pick(before_im, row, ROWS))
                tl.store(tail + line * T + tl.arange(0, T), pick(left, row, ROWS))
        else:
            place = carries + (line * spans + span) * 2 * N + mode
            tl.store(place, x_re)
            tl.store(place + N, x_im)
        x_re, x_im = pick(after_re, ROWS - 1, ROWS), pick(after_im, ROWS - 1, ROWS)


@triton.jit
def backward(
    q, k, v, past, weights, taps, into, out, leap, carries, numbers, dy, dlast, dtail,
    dq, dkeys, dv, dtoeplitz, dinto, dout, ddecay, dfirst,
    batch, length, batch_stride, channel_stride, channels, pieces,
    COUNT: tl.constexpr, BACK: tl.constexpr, GATED: tl.constexpr, RESETS: tl.constexpr,
    ROWS: tl.constexpr, T: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of signals, tables and first state; the states are computed again.

    A program sums up the gradients of the tables of one channel over every ``pieces``-th row of the
    batch, in a fixed order.
    """
    channel, piece = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    taps += channel * T
    into += channel * 2 * T * N
    out += channel * 2 * T * N
    leap += channel * 2 * (ROWS + 1) * N
    mode, row = tl.arange(0, N), tl.arange(0, ROWS)
    blocks = tl.cdiv(length, T)
    spans = tl.cdiv(blocks, ROWS)
    d_k = tl.zeros((T, T), tl.float32)
    d_into_re, d_into_im = tl.zeros((T, N), tl.float32), tl.zeros((T, N), tl.float32)
    d_out_re, d_out_im = tl.zeros((N, T), tl.float32), tl.zeros((N, T), tl.float32)
    d_a_re, d_a_im = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
    for entry in range(piece, batch, pieces):
        signal = entry * batch_stride + channel * channel_stride
        line, counted = entry * channels + channel, numbers + entry * length
        g_re, g_im = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
        for back in range(spans):
            span = spans - 1 - back
            start = span * ROWS * T
            u = load_rows(v + signal, start, length, ROWS, T)
            d_z = load_rows(dy + line * length, start, length, ROWS, T)
            if GATED:
                value, query = u, load_rows(q + signal, start, length, ROWS, T)
                keys = filtered(
                    k + signal, past + line * (COUNT - 1), weights + channel * COUNT, counted,
                    start, length, COUNT, BACK, RESETS, ROWS, T, PRECISION,
                )  # fmt: skip
                u = keys * value
            into_re, into_im = load_matrix(into, T, N), load_matrix(into + T * N, T, N)
            out_re, out_im = load_matrix(out, N, T), load_matrix(out + N * T, N, T)
            band = toeplitz(taps, 0, T, T)
            own, end, left = at_the_end(u, counted, start, length, RESETS, ROWS, T)
            s_re = tl.dot(left, into_re, input_precision=PRECISION)
            s_im = tl.dot(left, into_im, input_precision=PRECISION)
            place = carries + (line * spans + span) * 2 * N + mode
            _, _, x_re, x_im = sums(
                s_re, s_im, tl.load(place), tl.load(place + N), leap, counted, start, length,
                1, RESETS, ROWS, T, N,
            )  # fmt: skip
            if GATED:
                z = tl.dot(x_re, out_re, input_precision=PRECISION)
                z += tl.dot(x_im, out_im, input_precision=PRECISION)
                if RESETS:
                    z = tl.where(own == 0, z, 0.0)
                z += within(u, band, own, own, RESETS, PRECISION)
                store_rows(dq + line * length, z * d_z, start, length, ROWS, T)
                d_z = times(d_z, query)
            read = tl.where(own == 0, d_z, 0.0) if RESETS else d_z
            e_re = tl.dot(read, tl.trans(out_re), input_precision=PRECISION)
            e_im = tl.dot(read, tl.trans(out_im), input_precision=PRECISION)
            final = (span * ROWS + row == blocks - 1)[:, None]
            kept = final & (end == 0)
            e_re += tl.where(kept, tl.load(dlast + line * 2 * N + mode)[None, :], 0.0)
            e_im += tl.where(kept, tl.load(dlast + line * 2 * N + N + mode)[None, :], 0.0)
            now_re, now_im, later_re, later_im = sums(
                e_re, e_im, g_re, g_im, leap, counted, start, length, -1, RESETS, ROWS, T, N
            )
            d_left = tl.where(final, tl.load(dtail + line * T + tl.arange(0, T))[None, :], 0.0)
            d_left += tl.dot(later_re, tl.trans(into_re), input_precision=PRECISION)
            d_left += tl.dot(later_im, tl.trans(into_im), input_precision=PRECISION)
            d_u = tl.where(own == end, d_left, 0.0) if RESETS else d_left
            d_u += within(d_z, tl.trans(band), own, own, RESETS, PRECISION)
            if GATED:
                store_rows(dkeys + line * length, times(d_u, value), start, length, ROWS, T)
                d_u = times(d_u, keys)
            store_rows(dv + line * length, d_u, start, length, ROWS, T)
            d_k += correlated(u, d_z, own, own, RESETS, PRECISION)
            d_into_re += tl.dot(tl.trans(left), later_re, input_precision=PRECISION)
            d_into_im += tl.dot(tl.trans(left), later_im, input_precision=PRECISION)
            d_out_re += tl.dot(tl.trans(x_re), read, input_precision=PRECISION)
            d_out_im += tl.dot(tl.trans(x_im), read, input_precision=PRECISION)
            if RESETS:
                x_re, x_im = tl.where(end == 0, x_re, 0.0), tl.where(end == 0, x_im, 0.0)
            d_a_re += tl.sum(x_re * later_re + x_im * later_im, axis=0)
            d_a_im += tl.sum(x_re * later_im - x_im * later_re, axis=0)
            g_re, g_im = pick(now_re, 0, ROWS), pick(now_im, 0, ROWS)
        tl.store(dfirst + line * 2 * N + mode, g_re)
        tl.store(dfirst + line * 2 * N + N + mode, g_im)
    sheet = piece * channels + channel
    j, i = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    down, along = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(dtoeplitz + sheet * T * T + j * T + i, tl.where(i >= j, d_k, 0.0))
    tl.store(dinto + sheet * 2 * T * N + j * N + along, d_into_re)
    tl.store(dinto + (sheet * 2 + 1) * T * N + j * N + along, d_into_im)
    tl.store(dout + sheet * 2 * T * N + down * T + i, d_out_re)
    tl.store(dout + (sheet * 2 + 1) * T * N + down * T + i, d_out_im)
    tl.store(ddecay + sheet * 2 * N + mode, d_a_re)
    tl.store(ddecay + sheet * 2 * N + N + mode, d_a_im)
