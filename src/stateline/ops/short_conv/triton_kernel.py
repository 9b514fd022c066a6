"""Filters of a few taps: gradients of the keys' filter in H3, and short convolutions."""

import triton
import triton.language as tl

from stateline.ops.diagonal_ssm.triton_kernel import (
    correlated,
    documents,
    load_rows,
    toeplitz,
    within,
)


@triton.jit
def signal_gradient(
    dy, weights, dk, dpast, numbers, length, channels,
    COUNT: tl.constexpr, BACK: tl.constexpr, RESETS: tl.constexpr,
    ROWS: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of the inputs of ``diagonal.filtered``, and of the COUNT - 1 inputs before them."""
    channel, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    line = batch * channels + channel
    dy += line * length
    numbers += batch * length
    start = tl.program_id(2) * ROWS * T - BACK * T
    total = tl.zeros((ROWS, T), tl.float32)
    for block in tl.static_range(BACK + 1):
        later = load_rows(dy, start + block * T, length, ROWS, T)
        band = toeplitz(weights + channel * COUNT, block * T, COUNT, T)
        sources, own = 0, 0
        if RESETS:
            begin = start + block * T
            sources = documents(numbers, begin, 0, length, ROWS, T)
            own = documents(numbers, begin, block * T, length, ROWS, T)
        total += within(later, tl.trans(band), sources, own, RESETS, PRECISION)
    at = start + tl.arange(0, ROWS)[:, None] * T + tl.arange(0, T)[None, :]
    tl.store(dk + line * length + at, total, mask=(at >= 0) & (at < length))
    early = (at < 0) & (at >= 1 - COUNT)
    tl.store(dpast + line * (COUNT - 1) + at + (COUNT - 1), total, mask=early)


@triton.jit
def weight_gradient(
    dy, k, past, dband, numbers, batch, length, batch_stride, channel_stride, channels, pieces,
    COUNT: tl.constexpr, BACK: tl.constexpr, RESETS: tl.constexpr,
    ROWS: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one band (T, T) of the filter's matrix, summed over some rows of the batch."""
    channel, piece = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block = tl.program_id(2)
    total = tl.zeros((T, T), tl.float32)
    for entry in range(piece, batch, pieces):
        line = entry * channels + channel
        keys = k + entry * batch_stride + channel * channel_stride
        for start in range(0, length, ROWS * T):
            begin = start - block * T
            at = begin + tl.arange(0, ROWS)[:, None] * T + tl.arange(0, T)[None, :]
            early = (at < 0) & (at >= 1 - COUNT)
            x = load_rows(keys, begin, length, ROWS, T)
            before = past + line * (COUNT - 1) + at + (COUNT - 1)
            x += tl.load(before, mask=early, other=0.0).to(tl.float32)
            grad = load_rows(dy + line * length, start, length, ROWS, T)
            sources, own = 0, 0
            if RESETS:
                counted = numbers + entry * length
                sources = documents(counted, start, block * T, length, ROWS, T)
                own = documents(counted, start, 0, length, ROWS, T)
            total += correlated(x, grad, sources, own, RESETS, PRECISION)
    sheet = (piece * channels + channel) * (BACK + 1) + block
    j, i = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    tl.store(dband + sheet * T * T + j * T + i, total)


@triton.jit
def in_one(inside, numbers, time, other, length):
    """Which pairs of times lie inside the row and belong to the same document."""
    there = (time < length) & (other >= 0) & (other < length)
    one = tl.load(numbers + time, mask=there, other=0)
    return inside & there & (one == tl.load(numbers + other, mask=there, other=0))


@triton.jit
def short(
    u, weights, y, numbers, length, channels, outputs, row_stride, time_stride, channel_stride,
    COUNT: tl.constexpr, AHEAD: tl.constexpr, RESETS: tl.constexpr,
    TIMES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Convolve by taps; with AHEAD, correlate: the result is summed over filters of a channel.

    ``weights`` is (output, COUNT). Forward, u is the signal and y (row, length, output). With
    AHEAD, u is the gradient of the outputs, and y the gradient of the signal (row, length,
    channel). With RESETS, a time sees only times with its own number in ``numbers`` (row, time).
    """
    row = tl.program_id(2).to(tl.int64)
    time = tl.program_id(1) * TIMES + tl.arange(0, TIMES)[:, None]
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((TIMES, WIDTH), tl.float32)
    u += row * row_stride
    numbers += row * length
    columns = channels if AHEAD else outputs
    there = column < columns
    for output in range(0, outputs if AHEAD else 1, channels):
        for tap in tl.static_range(COUNT):
            other = time + tap if AHEAD else time - tap
            inside = (other >= 0) & (other < length) & there
            if RESETS:
                inside = in_one(inside, numbers, time, other, length)
            source = output + column if AHEAD else column % channels
            place = other * time_stride + source * channel_stride
            x = tl.load(u + place, mask=inside, other=0.0).to(tl.float32)
            total += tl.load(weights + (output + column) * COUNT + tap, mask=there, other=0.0) * x
    tl.store(y + (row * length + time) * columns + column, total, mask=(time < length) & there)


@triton.jit
def short_weights(
    dy, u, dweights, numbers, batch, length, channels, outputs,
    row_stride, time_stride, channel_stride, pieces,
    COUNT: tl.constexpr, RESETS: tl.constexpr, TIMES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradient of one tap of some outputs, summed over every ``pieces``-th row of the batch."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    tap, piece = tl.program_id(1), tl.program_id(2).to(tl.int64)
    total = tl.zeros((TIMES, WIDTH), tl.float32)
    for row in range(piece, batch, pieces):
        for start in range(0, length, TIMES):
            time = start + tl.arange(0, TIMES)[:, None]
            inside = (time >= tap) & (time < length) & (column < outputs)
            if RESETS:
                inside = in_one(inside, numbers + row * length, time, time - tap, length)
            place = (time - tap) * time_stride + column % channels * channel_stride
            x = tl.load(u + row * row_stride + place, mask=inside, other=0.0).to(tl.float32)
            place = row * length * outputs + time * outputs + column
            total += x * tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    summed = tl.sum(total, axis=0)
    output = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    place = (piece * outputs + output) * COUNT + tap
    tl.store(dweights + place, summed, mask=output < outputs)
