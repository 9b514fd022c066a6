"""Kernels for one token: the filters and recurrences change their states in place."""

import triton
import triton.language as tl


@triton.jit
def advance(x, count, total, column, weights, past, TAPS: tl.constexpr):
    """Filter one input after the past inputs (count, total), and shift them by one."""
    tap = tl.arange(0, TAPS)[:, None]
    there = (tap < count) & (column < total)[None, :]
    place = tap * total + column[None, :]
    old = tl.load(past + place, mask=there, other=0.0).to(tl.float32)
    weight = tl.load(weights + place, mask=there, other=0.0)
    now = tl.load(weights + count * total + column, mask=column < total, other=0.0)
    y = tl.sum(old * weight, axis=0) + now * x
    tl.debug_barrier()  # all of the past is read before any of it changes
    tl.store(past + place - total, old, mask=there & (tap > 0))
    if count > 0:
        tl.store(past + (count - 1) * total + column, x, mask=column < total)
    return y


@triton.jit
def recur(
    u, column, total, row, transition, b, c, skip, state, outputs,
    READOUTS: tl.constexpr, N: tl.constexpr, y, q, modes, GATED: tl.constexpr,
):  # fmt: skip
    """One step of the recurrence; writes each readout, with GATED multiplied by q."""
    mode = tl.arange(0, N)[None, :]
    there = (column < total)[:, None] & (mode < modes)
    place = (column[:, None] * modes + mode) * 2
    a_re = tl.load(transition + place, mask=there, other=0.0)
    a_im = tl.load(transition + place + 1, mask=there, other=0.0)
    own = state + row * total * modes * 2 + place
    x_re = tl.load(own, mask=there, other=0.0).to(tl.float32)
    x_im = tl.load(own + 1, mask=there, other=0.0).to(tl.float32)
    b_re = tl.load(b + place, mask=there, other=0.0)
    b_im = tl.load(b + place + 1, mask=there, other=0.0)
    drive = u[:, None]
    n_re = a_re * x_re - a_im * x_im + b_re * drive
    n_im = a_re * x_im + a_im * x_re + b_im * drive
    tl.store(own, n_re, mask=there)
    tl.store(own + 1, n_im, mask=there)
    for readout in tl.static_range(READOUTS):
        far = place + readout * total * modes * 2
        c_re = tl.load(c + far, mask=there, other=0.0)
        c_im = tl.load(c + far + 1, mask=there, other=0.0)
        output = readout * total + column
        o = 2 * tl.sum(c_re * n_re - c_im * n_im, axis=1)
        o += tl.load(skip + output, mask=column < total, other=0.0) * u
        if GATED:
            o *= q
        tl.store(y + row * outputs + output, o, mask=column < total)


@triton.jit
def h3(
    q, k, v, weights, transition, b, c, skip, past, state, y, count, total, modes,
    q_stride, k_stride, v_stride,
    TAPS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One token of the core of H3, with heads of one channel."""
    column, row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.program_id(1).to(tl.int64)
    inside = column < total
    key = tl.load(k + row * k_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(v + row * v_stride + column, mask=inside, other=0.0).to(tl.float32)
    query = tl.load(q + row * q_stride + column, mask=inside, other=0.0).to(tl.float32)
    own = past + row * count * total
    u = advance(key, count, total, column, weights, own, TAPS) * value
    recur(
        u, column, total, row, transition, b, c, skip, state, total,
        1, N, y, query, modes, True,
    )  # fmt: skip


@triton.jit
def diagonal(
    u, transition, b, c, skip, state, y, total, modes, stride,
    READOUTS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One input of a diagonal SSM."""
    column, row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.program_id(1).to(tl.int64)
    x = tl.load(u + row * stride + column, mask=column < total, other=0.0).to(tl.float32)
    recur(
        x, column, total, row, transition, b, c, skip, state, READOUTS * total,
        READOUTS, N, y, x, modes, False,
    )  # fmt: skip


@triton.jit
def filtered(
    u, weights, past, y, count, total, stride, TAPS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """One input of a short convolution."""
    column, row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.program_id(1).to(tl.int64)
    x = tl.load(u + row * stride + column, mask=column < total, other=0.0).to(tl.float32)
    o = advance(x, count, total, column, weights, past + row * count * total, TAPS)
    tl.store(y + row * total + column, o, mask=column < total)
