r"""Diagonal SSM by its recurrence: x_t = a x_{t-1} + b u_t, y_t = Re sum_n w_n x_{t,n}.

Coefficients are packed as (channel block, mode group, plane, WIDE), see ``pack``. Without a state
(``state is None``), b is part of w; with one, b has planes of its own.

Rounding a to the working precision would compound over the memory of a mode (5e-5 in the gradient
of log a at 64k). Every ``STEPS`` tokens the states are therefore multiplied by (a / rounded a) to
that power. The backward pass keeps the states at the beginning of blocks and computes those inside
again.
"""

# mypy: ignore-errors

import numpy as np

from stateline.ops.numba_common.blocks import (
    FLUSH,
    MODES,
    WIDE,
    flush,
    read_block,
    scratch,
    states_in,
    states_out,
    write_block,
)
from stateline.ops.numba_common.jit import kernel
from stateline.ops.numba_common.vector import LANES, align_stack, fold, load, store

TIME = 128
"""Tokens of a block in the forward pass."""

TIME_BACK = 64
"""Tokens of a block in the backward pass: the states of some modes stay in the L1 cache."""

STEPS = 16
"""Tokens after which states are corrected for the rounding of a."""

TINY = 1e-60
"""Square of a modulus of a below which nothing of the past is left to correct; near the least
float32, a / rounded a is far from 1, and the correction would change the present, too."""

SPAN = 4
"""Neighbouring channel blocks that are processed together, since memory access is then faster."""

BACK = (4 if LANES == 16 else 2) * LANES
"""Lanes of the modes that the backward pass takes together: four fit AVX-512's 32 registers."""

PLANES = 8
"""Re a, Im a, Re w, -Im w, the correction (2), b (2)."""

GRADIENTS = 6
"""Gradients of Re a, Im a, Re w, -Im w, b (2)."""


@kernel
def pack(p, a, b, c, channels, modes, fold_b):
    """Pack the coefficients: a (2, channel or 1, mode) in float64, b and c (channel, mode, 2)."""
    groups, size_a = (modes + MODES - 1) // MODES, a.size // 2
    p[:] = 0
    for channel in range(channels):
        for n in range(modes):
            i = channel * modes + n
            ar, ai, br, bi = a[i % size_a], a[size_a + i % size_a], b[2 * i], b[2 * i + 1]
            wr, wi = 2 * c[2 * i], 2 * c[2 * i + 1]
            if fold_b:
                wr, wi = wr * br - wi * bi, wr * bi + wi * br
            at = channel // LANES * groups + n // MODES
            at = at * PLANES * WIDE + n % MODES * LANES + channel % LANES
            p[at], p[at + WIDE], p[at + 2 * WIDE], p[at + 3 * WIDE] = ar, ai, wr, -wi
            p[at + 6 * WIDE], p[at + 7 * WIDE] = br, bi
            rr, ri = np.float64(p[at]), np.float64(p[at + WIDE])
            size = rr * rr + ri * ri
            if size > TINY:  # (a - r) / r, which is log(a / r) up to its square
                er, ei = ar - rr, ai - ri
                p[at + 4 * WIDE] = STEPS * (er * rr + ei * ri) / size
                p[at + 5 * WIDE] = STEPS * (ei * rr - er * ri) / size


@kernel
def unpack(dp, a, b, c, dlog_a, db, dc, channels, modes, fold_b):
    """Gradients of the parameters, from the gradients of the packed coefficients."""
    groups, size_a = (modes + MODES - 1) // MODES, a.size // 2
    dlog_a[:] = 0
    for channel in range(channels):
        for n in range(modes):
            at = channel // LANES * groups + n // MODES
            at = at * GRADIENTS * WIDE + n % MODES * LANES + channel % LANES
            gr, gi, wr, wi = dp[at], dp[at + WIDE], dp[at + 2 * WIDE], -dp[at + 3 * WIDE]
            i, j = channel * modes + n, 2 * (channel * modes + n)
            ar, ai, k = a[i % size_a], a[size_a + i % size_a], 2 * (i % size_a)
            dlog_a[k] += gr * ar + gi * ai
            dlog_a[k + 1] += gi * ar - gr * ai
            wr, wi = 2 * wr, 2 * wi
            if fold_b:
                db[j], db[j + 1] = wr * c[j] + wi * c[j + 1], wi * c[j] - wr * c[j + 1]
                dc[j], dc[j + 1] = wr * b[j] + wi * b[j + 1], wi * b[j] - wr * b[j + 1]
            else:
                db[j], db[j + 1] = dp[at + 4 * WIDE], dp[at + 5 * WIDE]
                dc[j], dc[j + 1] = wr, wi


@kernel
def _correct(xr, xi, r, i):
    """The product of x and 1 + r + i j."""
    return xr + (r * xr - i * xi), xi + (r * xi + i * xr)


@kernel
def _next(xr, xi, a, b, u, f, g, state):
    """States times a + b j, plus u; with ``state``, plus u (f + g j)."""
    if state is None:
        return u - b * xi + a * xr, b * xr + a * xi
    return f * u - b * xi + a * xr, g * u + b * xr + a * xi


@kernel
def advance(ub, yb, rows, x, at, p, k, state):
    """A block of tokens through one group of modes: x is their state, yb takes their outputs.

    Without yb there are no outputs.
    """
    align_stack()
    xr, xi = load(x, at, WIDE), load(x, at + WIDE, WIDE)
    a, b = load(p, k, WIDE), load(p, k + WIDE, WIDE)
    c, e = load(p, k + 2 * WIDE, WIDE), load(p, k + 3 * WIDE, WIDE)
    f, g = load(p, k + 6 * WIDE, WIDE), load(p, k + 7 * WIDE, WIDE)
    for first in range(0, rows, STEPS):
        last = min(first + STEPS, rows)
        for t in range(first, last):
            u = load(ub, t * LANES, LANES)
            xr, xi = _next(xr, xi, a, b, u, f, g, state)
            if yb is not None:
                store(yb, t * LANES, load(yb, t * LANES, LANES) + fold(c * xr + e * xi))
        share = (last - first) / STEPS
        r, i = share * load(p, k + 4 * WIDE, WIDE), share * load(p, k + 5 * WIDE, WIDE)
        xr, xi = _correct(xr, xi, r, i)
    store(x, at, xr)
    store(x, at + WIDE, xi)


@kernel
def _place(row, block, channels, modes):
    """Where the states of a channel block begin; negative for row -1."""
    return (row * channels + block * LANES) * modes * 2


@kernel
def forward(u, y, p, state, after, borders, sources, targets, channels, modes, start, stop):
    """Tasks ``start`` to ``stop`` of (document, channel block).

    Document n has the tokens ``borders[n]`` to ``borders[n + 1]``. It continues the state of row
    ``sources[n]`` (-1: zeros) and leaves the state of row ``targets[n]`` (-1: none).
    """
    align_stack()
    blocks, groups = (channels + LANES - 1) // LANES, (modes + MODES - 1) // MODES
    size = groups * 2 * WIDE
    x = scratch(SPAN * size, u)
    ub, yb = scratch(TIME * LANES, u), scratch(TIME * LANES, u)
    task = start
    while task < stop:
        document, begin = task // blocks, task % blocks
        end = min(begin + SPAN, begin + stop - task, blocks)
        origin, length = borders[document], borders[document + 1] - borders[document]
        for block in range(begin, end):
            where = _place(sources[document], block, channels, modes)
            lanes, at = min(LANES, channels - block * LANES), (block - begin) * size
            states_in(x, at, state, where, modes, lanes, 2)
        for first in range(0, length, TIME):
            rows = min(TIME, length - first)
            for block in range(begin, end):
                lanes, at = min(LANES, channels - block * LANES), (block - begin) * size
                place = (origin + first) * channels + block * LANES
                read_block(ub, u, place, channels, rows, lanes)
                yb[:] = 0
                k = block * groups * PLANES * WIDE
                for m in range(groups):
                    advance(ub, yb, rows, x, at + m * 2 * WIDE, p, k + m * PLANES * WIDE, state)
                write_block(y, place, channels, rows, lanes, yb)
        if state is not None:
            for block in range(begin, end):
                where = _place(targets[document], block, channels, modes)
                lanes, at = min(LANES, channels - block * LANES), (block - begin) * size
                states_out(after, where, modes, lanes, 2, x, at)
        task += end - begin


@kernel
def _states(ub, gb, rows, x, at, p, k, h, grad, j, state):
    """States of some modes before each token, into h; gradients of w into grad."""
    align_stack()
    xr, xi = load(x, at, BACK), load(x, at + WIDE, BACK)
    a, b = load(p, k, BACK), load(p, k + WIDE, BACK)
    f, g = load(p, k + 6 * WIDE, BACK), load(p, k + 7 * WIDE, BACK)
    dc, de = load(grad, j + 2 * WIDE, BACK), load(grad, j + 3 * WIDE, BACK)
    for first in range(0, rows, STEPS):
        for t in range(first, min(first + STEPS, rows)):
            store(h, 2 * t * BACK, xr)
            store(h, (2 * t + 1) * BACK, xi)
            u, gy = load(ub, t * LANES, LANES), load(gb, t * LANES, LANES)
            xr, xi = _next(xr, xi, a, b, u, f, g, state)
            dc = dc + gy * xr
            de = de + gy * xi
        xr, xi = _correct(xr, xi, load(p, k + 4 * WIDE, BACK), load(p, k + 5 * WIDE, BACK))
    store(grad, j + 2 * WIDE, dc)
    store(grad, j + 3 * WIDE, de)


@kernel
def _adjoint(ub, gb, db, rows, lam, at, p, k, h, grad, j, state):
    """Gradients of the states back through a block; lam: gradient of the state before it."""
    align_stack()
    lr, li = load(lam, at, BACK), load(lam, at + WIDE, BACK)
    a, b = load(p, k, BACK), load(p, k + WIDE, BACK)
    c, e = load(p, k + 2 * WIDE, BACK), load(p, k + 3 * WIDE, BACK)
    dar, dai = load(grad, j, BACK), load(grad, j + WIDE, BACK)
    if state is not None:
        f, g = load(p, k + 6 * WIDE, BACK), load(p, k + 7 * WIDE, BACK)
        dbr, dbi = load(grad, j + 4 * WIDE, BACK), load(grad, j + 5 * WIDE, BACK)
    for first in range((rows - 1) // STEPS * STEPS, -1, -STEPS):
        last = min(first + STEPS, rows)
        share = (last - first) / STEPS
        r, i = share * load(p, k + 4 * WIDE, BACK), share * load(p, k + 5 * WIDE, BACK)
        lr, li = lr + (r * lr + i * li), li + (r * li - i * lr)
        for t in range(last - 1, first - 1, -1):
            gy = load(gb, t * LANES, LANES)
            xr, xi = load(h, 2 * t * BACK, BACK), load(h, (2 * t + 1) * BACK, BACK)
            lr = lr + c * gy
            li = li + e * gy
            dar = dar + lr * xr + li * xi
            dai = dai + li * xr - lr * xi
            if state is None:
                store(db, t * LANES, load(db, t * LANES, LANES) + fold(lr))
            else:
                u = load(ub, t * LANES, LANES)
                dbr = dbr + u * lr
                dbi = dbi + u * li
                store(db, t * LANES, load(db, t * LANES, LANES) + fold(f * lr + g * li))
            before = a * lr + b * li
            li = a * li - b * lr
            lr = before
    store(lam, at, lr)
    store(lam, at + WIDE, li)
    store(grad, j, dar)
    store(grad, j + WIDE, dai)
    if state is not None:
        store(grad, j + 4 * WIDE, dbr)
        store(grad, j + 5 * WIDE, dbi)


@kernel
def retreat(ub, gb, db, rows, kept, place, lam, there, p, k, h, grad, g, groups, state):
    """All modes back through a block: adds the gradient of ub to db, the others to grad."""
    for m in range(groups):
        for inside in range(0, WIDE, BACK):
            at, j = m * 2 * WIDE + inside, g + m * GRADIENTS * WIDE + inside
            kk = k + m * PLANES * WIDE + inside
            _states(ub, gb, rows, kept, place + at, p, kk, h, grad, j, state)
            _adjoint(ub, gb, db, rows, lam, there + at, p, kk, h, grad, j, state)


@kernel
def backward(
    gy, gafter, u, du, p, state, dstate, dp, batch, borders, sources, targets, longest, channels,
    modes, pieces, start, stop,
):  # fmt: skip
    """Tasks of (piece of the documents, channel block); dp takes the gradients of each task."""
    align_stack()
    blocks, groups = (channels + LANES - 1) // LANES, (modes + MODES - 1) // MODES
    size, most = groups * 2 * WIDE, max(1, (longest + TIME_BACK - 1) // TIME_BACK)
    kept, lam = scratch(SPAN * most * size, u), scratch(SPAN * size, u)
    ub, gb = scratch(TIME_BACK * LANES, u), scratch(TIME_BACK * LANES, u)
    db, h = scratch(TIME_BACK * LANES, u), scratch(TIME_BACK * 2 * BACK, u)
    many = groups * GRADIENTS * WIDE
    grad, task = scratch(SPAN * many, u), start
    grad[:] = 0
    while task < stop:
        piece, begin = task // blocks, task % blocks
        end = min(begin + SPAN, begin + stop - task, blocks)
        dp[task * many : (task + end - begin) * many] = 0
        done = 0  # blocks of time, of all rows
        for document in range(batch * piece // pieces, batch * (piece + 1) // pieces):
            origin, length = borders[document], borders[document + 1] - borders[document]
            count = max(1, (length + TIME_BACK - 1) // TIME_BACK)
            for block in range(begin, end):
                lanes, at = min(LANES, channels - block * LANES), (block - begin) * size
                where = _place(sources[document], block, channels, modes)
                states_in(kept, most * at, state, where, modes, lanes, 2)
                where = _place(targets[document], block, channels, modes)
                states_in(lam, at, gafter, where, modes, lanes, 2)
            for n in range(1, count):
                for block in range(begin, end):
                    lanes = min(LANES, channels - block * LANES)
                    place = (origin + (n - 1) * TIME_BACK) * channels + block * LANES
                    read_block(ub, u, place, channels, TIME_BACK, lanes)
                    at, k = ((block - begin) * most + n) * size, block * groups * PLANES * WIDE
                    kept[at : at + size] = kept[at - size : at]
                    for m in range(groups):
                        here, there = at + m * 2 * WIDE, k + m * PLANES * WIDE
                        advance(ub, None, TIME_BACK, kept, here, p, there, state)
            for n in range(count - 1, -1, -1):
                rows = min(TIME_BACK, length - n * TIME_BACK)
                for block in range(begin, end):
                    lanes = min(LANES, channels - block * LANES)
                    place = (origin + n * TIME_BACK) * channels + block * LANES
                    read_block(ub, u, place, channels, rows, lanes)
                    read_block(gb, gy, place, channels, rows, lanes)
                    db[:] = 0
                    at, k = ((block - begin) * most + n) * size, block * groups * PLANES * WIDE
                    there, j = (block - begin) * size, (block - begin) * many
                    retreat(ub, gb, db, rows, kept, at, lam, there, p, k, h, grad, j, groups, state)
                    write_block(du, place, channels, rows, lanes, db)
                done += 1
                if done % FLUSH == 0:
                    flush(dp, task * many, grad, 0, (end - begin) * many)
            if state is not None:
                for block in range(begin, end):
                    where = _place(sources[document], block, channels, modes)
                    lanes, at = min(LANES, channels - block * LANES), (block - begin) * size
                    states_out(dstate, where, modes, lanes, 2, lam, at)
        flush(dp, task * many, grad, 0, (end - begin) * many)
        task += end - begin
