"""Selective scan: a program carries the states of WIDTH channels of a row from tile to tile.

A tile has TIMES tokens. Inside it, the states (TIMES, WIDTH, N) are found by an associative scan
over pairs (decay, drive). Times beyond the sequence have a step of zero: the state stays. With
RESETS, the decay of a token is zero if its entry of ``begins`` (row, time) is nonzero.
"""

import triton
import triton.language as tl

from stateline.ops.triton_common.selection import is_finite, times


@triton.jit
def compose(decay, drive, later_decay, later_drive):
    """The map h -> decay h + drive, then a later one."""
    return decay * later_decay, times(later_decay, drive) + later_drive


@triton.jit
def compose_kept(decay, drive, kept, later_decay, later_drive, later_kept):
    """As ``compose``, with what is left of earlier drives when the last token's is added."""
    passed = times(later_decay, drive)
    return decay * later_decay, passed + later_drive, passed + later_kept


@triton.jit
def load_tile(x, start, length, column, columns, stride, TIMES: tl.constexpr):
    """Some columns of tokens ``start``, ..., ``stride`` entries apart; zeros where none are."""
    time = start + tl.arange(0, TIMES)[:, None]
    inside = (time < length) & (column < columns)[None, :]
    return tl.load(x + time * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(x, tile, start, length, column, columns, stride, TIMES: tl.constexpr):
    """The inverse of ``load_tile``."""
    time = start + tl.arange(0, TIMES)[:, None]
    inside = (time < length) & (column < columns)[None, :]
    tl.store(x + time * stride + column[None, :], tile, mask=inside)


@triton.jit
def decays(dt, a, begins, start, length, RESETS: tl.constexpr, TIMES: tl.constexpr):
    """Decays of the tokens ``start``, ... of a tile, whose steps are dt.

    Where a step is not finite, so is the drive; the decay is zero, and nothing flows back there.
    """
    decay = tl.exp(dt[:, :, None] * a[None, :, :])
    decay = tl.where(is_finite(dt)[:, :, None], decay, 0.0)
    if RESETS:
        time = start + tl.arange(0, TIMES)
        begun = tl.load(begins + time, mask=time < length, other=0) != 0
        decay = tl.where(begun[:, None, None], 0.0, decay)
    return decay


@triton.jit
def over_times(decay, drive, REVERSE: tl.constexpr):
    """The maps of a tile's tokens, each composed with all earlier or, with REVERSE, later ones."""
    if decay.shape[0] > 1:
        decay, drive = tl.associative_scan((decay, drive), 0, compose, reverse=REVERSE)
    return decay, drive


@triton.jit
def scan_kept(u, dt, b, decay, before):
    """States of a tile, and in each the part that comes from the state before.

    A state minus its drive would be this part only with the rounding errors of the state.
    """
    drive = (dt * u)[:, :, None] * b[:, None, :]
    whole, h, kept = decay, drive, tl.zeros_like(drive)
    if decay.shape[0] > 1:
        whole, h, kept = tl.associative_scan((decay, drive, kept), 0, compose_kept)
    before = times(whole, before[None, :, :])
    return h + before, kept + before


@triton.jit
def row_of(x, row, TIMES: tl.constexpr):
    """One time of a tile (TIMES, WIDTH, N)."""
    chosen = (tl.arange(0, TIMES) == row)[:, None, None]
    return tl.sum(tl.where(chosen, x, 0.0), axis=0)


@triton.jit
def states_of(channels, column, states, N: tl.constexpr):
    """Places of the states of some channels in (channel, state), and which of them exist."""
    entry = tl.arange(0, N)[None, :]
    return column[:, None] * states + entry, (column < channels)[:, None] & (entry < states)


@triton.jit
def own_channels(channels, groups, WIDTH: tl.constexpr):
    """Group of a program, its block there, and its channels; missing ones are ``channels``."""
    blocks, each = tl.num_programs(0) // groups, channels // groups
    group, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    column = block * WIDTH + tl.arange(0, WIDTH)
    return group, block, tl.where(column < each, group * each + column, channels)


@triton.jit
def forward(
    u, dt, b, c, a, first, y, last, carries, begins, length, channels, groups, states,
    OUTPUT: tl.constexpr, RESETS: tl.constexpr,
    TIMES: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Outputs and last states; without OUTPUT, the states before every tile."""
    row = tl.program_id(1).to(tl.int64)
    group, _block, column = own_channels(channels, groups, WIDTH)
    signal, vectors = row * length * channels, (row * length * groups + group) * states
    own, there = states_of(channels, column, states, N)
    place = row * channels * states + own
    transition = tl.load(a + own, mask=there, other=0.0)
    h = tl.load(first + place, mask=there, other=0.0).to(tl.float32)
    entry, apart, size = tl.arange(0, N), groups * states, channels * states
    tiles = tl.cdiv(length, TIMES)
    for tile in range(tiles):
        start = tile * TIMES
        if not OUTPUT:
            here = (row * tiles + tile) * size + own
            tl.store(carries + here, h, mask=there)
        x_dt = load_tile(dt + signal, start, length, column, channels, channels, TIMES)
        x_u = load_tile(u + signal, start, length, column, channels, channels, TIMES)
        x_b = load_tile(b + vectors, start, length, entry, states, apart, TIMES)
        decay = decays(x_dt, transition, begins + row * length, start, length, RESETS, TIMES)
        whole, x = over_times(decay, (x_dt * x_u)[:, :, None] * x_b[:, None, :], False)
        x += times(whole, h[None, :, :])
        if OUTPUT:
            read = load_tile(c + vectors, start, length, entry, states, apart, TIMES)
            o = tl.sum(x * read[:, None, :], axis=2)
            store_tile(y + signal, o, start, length, column, channels, channels, TIMES)
        h = row_of(x, TIMES - 1, TIMES)
    if OUTPUT:
        tl.store(last + place, h, mask=there)


@triton.jit
def backward(
    u, dt, b, c, a, carries, begins, dy, dlast, du, ddt, da, db, dc, dfirst,
    length, channels, groups, states,
    RESETS: tl.constexpr, TIMES: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Gradients of everything: of a for each row, of b and c for each program of a group.

    The adjoint g of the states obeys g_t = C_t dy_t + decay_{t+1} g_{t+1}.
    """
    row = tl.program_id(1).to(tl.int64)
    group, block, column = own_channels(channels, groups, WIDTH)
    signal, vectors = row * length * channels, (row * length * groups + group) * states
    begins += row * length
    sheet = block * tl.num_programs(1) * length * groups * states + vectors
    own, there = states_of(channels, column, states, N)
    place = row * channels * states + own
    transition = tl.load(a + own, mask=there, other=0.0)
    g = tl.load(dlast + place, mask=there, other=0.0)
    d_a = tl.zeros((WIDTH, N), tl.float32)
    entry, apart, size = tl.arange(0, N), groups * states, channels * states
    tiles = tl.cdiv(length, TIMES)
    for back in range(tiles):
        tile = tiles - 1 - back
        start = tile * TIMES
        here = (row * tiles + tile) * size + own
        x_u = load_tile(u + signal, start, length, column, channels, channels, TIMES)
        x_dt = load_tile(dt + signal, start, length, column, channels, channels, TIMES)
        x_b = load_tile(b + vectors, start, length, entry, states, apart, TIMES)
        before = tl.load(carries + here, mask=there, other=0.0)
        decay = decays(x_dt, transition, begins, start, length, RESETS, TIMES)
        h, kept = scan_kept(x_u, x_dt, x_b, decay, before)
        d_y = load_tile(dy + signal, start, length, column, channels, channels, TIMES)
        x_c = load_tile(c + vectors, start, length, entry, states, apart, TIMES)
        later = load_tile(dt + signal, start + 1, length, column, channels, channels, TIMES)
        decay = decays(later, transition, begins, start + 1, length, RESETS, TIMES)
        entering = times(d_y[:, :, None], x_c[:, None, :])
        whole, adjoint = over_times(decay, entering, True)
        adjoint += times(whole, g[None, :, :])
        g = row_of(adjoint, 0, TIMES)
        kept *= adjoint
        d_signal = tl.sum(adjoint * x_b[:, None, :], axis=2)
        d_dt = x_u * d_signal + tl.sum(kept * transition[None, :, :], axis=2)
        store_tile(du + signal, x_dt * d_signal, start, length, column, channels, channels, TIMES)
        store_tile(ddt + signal, d_dt, start, length, column, channels, channels, TIMES)
        d_a += tl.sum(kept * x_dt[:, :, None], axis=0)
        d_b = tl.sum(adjoint * (x_dt * x_u)[:, :, None], axis=1)
        d_c = tl.sum(h * d_y[:, :, None], axis=1)
        store_tile(db + sheet, d_b, start, length, entry, states, apart, TIMES)
        store_tile(dc + sheet, d_c, start, length, entry, states, apart, TIMES)
    first = tl.load(dt + signal + column, mask=column < channels, other=0.0).to(tl.float32)
    kept_first = tl.where(is_finite(first)[:, None], tl.exp(first[:, None] * transition), 0.0)
    if RESETS:
        kept_first = tl.where(tl.load(begins) != 0, 0.0, kept_first)
    tl.store(dfirst + place, times(kept_first, g), mask=there)
    tl.store(da + place, d_a, mask=there)
