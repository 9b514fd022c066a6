r"""Diagonal-plus-low-rank state space model by powers of its real transition matrix.

A state is a row of N real numbers, the planes of its modes, and a step multiplies it by a matrix T.
The kernel :math:`k_{iJ + j} = (b T^j) \cdot (T^{iJ} c)` is one matrix product of two orbits of
:math:`\sqrt L` rows each, computed by doubling with :math:`\log_2 L` squarings of T. This is done
in float64, because fast modes lose their phase in float32.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from stateline.ops.dplr_ssm import DPLRWeights
from stateline.ops.fft_conv import fft_conv
from stateline.ops.planes import divide, multiply, precise, real_rows


def dplr_ssm(u: Tensor, weights: DPLRWeights, state: Tensor | None) -> tuple[Tensor, Any]:
    """Convolve; with a state, add the response to it, and compute the state after the chunk."""
    length = u.shape[-2]
    if state is not None and not length:
        return u.new_zeros(*u.shape[:-1], len(weights.c)), state
    dt, a, p, b, c = map(precise, weights)
    step, b_bar = transition(dt, a, p), _input(dt, a, p, b)
    nothing = b_bar.new_zeros(0, *b_bar.shape)
    x = nothing if state is None else precise(state).reshape(-1, *b_bar.shape)  # (row, channel, N)
    starts = torch.cat([b_bar[None], (x[..., None, :] @ step)[..., 0, :]])
    near, far = _orbit(starts, step, _block(length))  # (1 + row, channel, J, N)
    readouts = real_rows(c).unflatten(0, (-1, u.shape[-1]))  # (readout, channel, N)
    distant, _ = _orbit(readouts, far.mT, _count(length))
    responses = (distant[:, None] @ near.mT).flatten(-2)[..., :length]
    if state is None:
        return convolve(u, responses[:, 0]), None
    signal = u.to(state.dtype)  # the sum of both parts is rounded once
    from_state = responses[:, 1:].movedim(0, 1).flatten(1, 2).mT.reshape(*u.shape[:-1], len(c))
    y = convolve(signal, responses[:, 0]) + from_state.to(signal.dtype)
    after = _end(signal.reshape(-1, *u.shape[-2:]), x, near, far)
    return y.to(u.dtype), after.reshape(state.shape).to(state.dtype)


def dplr_ssm_every(u: Tensor, weights: DPLRWeights, stride: int) -> Tensor:
    """Sum up each block of ``stride`` inputs as a state, scan the blocks, read the states."""
    channels, count = u.shape[-1], u.shape[-2] // stride
    dt, a, p, b, c = map(precise, weights)
    step, b_bar = transition(dt, a, p), _input(dt, a, p, b)
    left, _ = _orbit(b_bar, step, stride)
    blocks = precise(u[..., : count * stride, :]).mT.unflatten(-1, (count, stride))
    after = blocks.to(left.dtype) @ left[:, :stride].flip(-2)  # (*batch, channel, block, N)
    power, distance = torch.linalg.matrix_power(step, stride), 1
    while distance < count:  # each state is that of the last blocks, twice as many every time
        further = after[..., distance:, :] + after[..., :-distance, :] @ power
        after = torch.cat([after[..., :distance, :], further], dim=-2)
        power, distance = power @ power, 2 * distance
    readouts = real_rows(c).unflatten(0, (-1, channels))
    y = after @ readouts.movedim(0, -1)  # (*batch, channel, block, readout)
    return y.movedim(-3, -1).flatten(-2).to(u.dtype)


def dplr_ssm_step(u: Tensor, weights: DPLRWeights, state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the recurrence once; the cost is linear in the number of modes."""
    dt, a, p, b, c = weights
    drive = dt[:, None, None] * b * u.to(state.dtype)[..., None, None]
    state = advance(state, drive, dt, a, p)
    readouts = c.unflatten(0, (-1, u.shape[-1]))
    y = 2 * multiply(readouts, state[..., None, :, :, :])[..., 0].sum(dim=-1)
    return y.flatten(-2).to(u.dtype), state


def advance(
    x: Float[Tensor, "*batch #channel mode 2"],
    drive: Float[Tensor, "*batch #channel mode 2"],
    dt: Float[Tensor, " channel"],
    a: Float[Tensor, "channel mode 2"],
    p: Float[Tensor, "channel mode 2"],
) -> Float[Tensor, "*batch channel mode 2"]:
    r"""One bilinear step, :math:`(1 - \frac{dt}{2} A)^{-1} ((1 + \frac{dt}{2} A) x + drive)`.

    With :math:`A = \Lambda - P P^*` on both halves of the modes, :math:`P^* x` is the real number
    :math:`2\,\mathrm{Re} \sum_n \bar P_n x_n`, and the Woodbury identity leaves only divisions.
    """
    half = dt[:, None, None] / 2
    one = torch.tensor([1.0, 0.0], dtype=a.dtype, device=a.device)
    diagonal = one - half * a
    right = x + half * (multiply(a, x) - p * _inner(p, x)) + drive
    solved, low_rank = divide(right, diagonal), half * divide(p, diagonal)
    return solved - low_rank * (_inner(p, solved) / (1 + _inner(p, low_rank)))


def _inner(
    p: Float[Tensor, "channel mode 2"], x: Float[Tensor, "*batch #channel mode 2"]
) -> Float[Tensor, "*batch channel 1 1"]:
    """Inner product over both halves of the modes."""
    return 2 * (p * x).sum(dim=(-2, -1), keepdim=True)


def transition(
    dt: Float[Tensor, " channel"],
    a: Float[Tensor, "channel mode 2"],
    p: Float[Tensor, "channel mode 2"],
) -> Float[Tensor, "channel size size"]:
    """Matrix of one step: row i is the image of the i-th unit state."""
    modes = a.shape[1]
    units = torch.eye(2 * modes, dtype=a.dtype, device=a.device).unflatten(-1, (1, modes, 2))
    return advance(units, torch.zeros_like(units), dt, a, p).flatten(-2).transpose(0, 1)


def _input(
    dt: Float[Tensor, " channel"],
    a: Float[Tensor, "channel mode 2"],
    p: Float[Tensor, "channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
) -> Float[Tensor, "channel size"]:
    """State after a unit input, from the zero state."""
    return advance(torch.zeros_like(b), dt[:, None, None] * b, dt, a, p).flatten(-2)


def _orbit(
    start: Float[Tensor, "*batch channel size"],
    step: Float[Tensor, "channel size size"],
    count: int,
) -> tuple[Float[Tensor, "*batch channel count size"], Float[Tensor, "channel size size"]]:
    """Rows times the powers 0 .. n - 1 of a matrix, and its power n, by doubling.

    n is the smallest power of two that is at least ``count``.
    """
    orbit = start[..., None, :]
    while orbit.shape[-2] < count:
        orbit = torch.cat([orbit, orbit @ step], dim=-2)
        step = step @ step
    return orbit, step


def _end(
    u: Float[Tensor, "row length channel"],
    x: Float[Tensor, "row channel size"],
    near: Float[Tensor, "starts channel block size"],
    far: Float[Tensor, "channel size size"],
) -> Float[Tensor, "row channel size"]:
    """State after all inputs, block by block; the first block may be shorter than the others."""
    length, block = u.shape[1], near.shape[-2]
    count = math.ceil(length / block)
    first = length - (count - 1) * block
    early = pad(u, (0, 0, block - first, 0))  # leading zeros do not change the state
    blocks = early.mT.unflatten(-1, (count, block))  # (row, channel, count, block)
    driven = (blocks @ near[0].flip(-2).to(u.dtype)).to(x.dtype)
    x = near[1:, :, first - 1] + driven[:, :, 0]
    for index in range(1, count):
        x = (x[..., None, :] @ far)[..., 0, :] + driven[:, :, index]
    return x


def convolve(
    u: Float[Tensor, "*batch length channel"], kernel: Float[Tensor, "readout channel taps"]
) -> Float[Tensor, "*batch length output"]:
    """Convolve with the kernels of all readouts, ordered by readout, then channel.

    In float64, because the terms of the transition's gradient nearly cancel.
    """
    signal = precise(u)
    return fft_conv(signal, kernel.flatten(0, 1).to(signal.dtype)).to(u.dtype)


def _block(length: int) -> int:
    """Block length: a power of two near the root of the length."""
    return 1 << (max(length - 1, 0).bit_length() + 1) // 2


def _count(length: int) -> int:
    """Number of blocks that cover the length, rounded up to a power of two."""
    return 1 << max(math.ceil(length / _block(length)) - 1, 0).bit_length()
