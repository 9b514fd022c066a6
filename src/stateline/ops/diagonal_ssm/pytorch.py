r"""Diagonal state space model by convolution and matrix products, on any device.

Every power of the transition is a product of two entries of small tables,
:math:`a^{iJ + j} = a^{iJ} a^j` with :math:`j < J \approx \sqrt L`. L powers cost
:math:`2\sqrt L` exponentials and one real matrix product. The tables are computed in float64.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from stateline.ops.diagonal_ssm import DiagonalWeights
from stateline.ops.diagonal_ssm.reference import stepper_of
from stateline.ops.fft_conv import fft_conv
from stateline.ops.linear import rounds_products
from stateline.ops.planes import conjugate, exponential, multiply, powers_of, precise, real_rows
from stateline.ops.scan import diagonal_scan


def diagonal_ssm(u: Tensor, weights: DiagonalWeights, state: Tensor | None) -> tuple[Tensor, Any]:
    r"""Convolve, and add the response to the state, :math:`2\,\mathrm{Re}\,c\,a^{t+1} x`."""
    if state is None:
        return _from_zero(u, weights), None
    (log_a, b, c), length = weights, u.shape[-2]
    state = state.to(torch.promote_types(state.dtype, b.dtype))
    signal = u.to(state.dtype)  # the sum of both parts is rounded once
    inner, outer = _tables(log_a, length, first=1)
    inner, outer = inner.to(state.dtype), outer.to(state.dtype)
    read = multiply(c.unflatten(0, (-1, u.shape[-1])), state[..., None, :, :, :])
    from_state = _readout(read, inner, outer).flatten(-3, -2)[..., :length].mT
    y = _from_zero(signal, weights) + from_state
    kept = multiply(exponential(length * precise(log_a)).to(state.dtype), state)
    return y.to(u.dtype), kept + multiply(b, _driven(signal, log_a))


def _from_zero(u: Tensor, weights: DiagonalWeights) -> Tensor:
    """Convolve with the impulse response."""
    (log_a, b, c), length = weights, u.shape[-2]
    inner, outer = _tables(log_a, length, first=0)
    readouts = c.unflatten(0, (-1, u.shape[-1]))  # (readout, channel, mode, 2)
    kernel = _readout(multiply(readouts, b), inner, outer).flatten(0, 1)[:, :length]
    return fft_conv(u, kernel.to(torch.promote_types(u.dtype, torch.float32)))


def diagonal_ssm_every(u: Tensor, weights: DiagonalWeights, stride: int) -> Tensor:
    """Sum up each block of ``stride`` inputs as a state, scan the blocks, read the states."""
    log_a, b, c = weights
    channels, modes = b.shape[:2]
    dtype = torch.promote_types(u.dtype, torch.float32)
    whole = u.shape[-2] // stride * stride
    blocks = u[..., :whole, :].to(dtype).unflatten(-2, (-1, stride))
    inner, outer = _tables(log_a, stride, first=0)
    powers = multiply(outer[..., None, :], inner[..., None, :, :]).flatten(-3, -2)
    into = multiply(b[..., None, :], powers[..., :stride, :].flip(-2)).transpose(-3, -2).flatten(-2)
    rows = blocks.flatten(0, -3).movedim(-1, 0)  # (channel, row * block, place in the block)
    driven = (rows @ into.to(dtype)).movedim(0, 1).reshape(*blocks.shape[:-2], channels * modes, 2)
    zeros = driven.new_zeros(*u.shape[:-2], channels * modes, 2)
    log_all = stride * log_a.expand(channels, -1, -1).flatten(0, 1)
    states = diagonal_scan(driven, log_all, zeros).reshape(-1, channels, 2 * modes)
    read = real_rows(c).unflatten(0, (-1, channels))
    y = states.transpose(0, 1) @ read.permute(1, 2, 0).to(dtype)
    return y.permute(1, 2, 0).reshape(*blocks.shape[:-2], len(c)).to(u.dtype)


def diagonal_ssm_step(u: Tensor, weights: DiagonalWeights, state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the recurrence once, in real planes."""
    log_a, b, c = weights
    state = multiply(exponential(log_a), state) + b * u.to(state.dtype)[..., None, None]
    readouts = c.unflatten(0, (-1, u.shape[-1]))
    y = 2 * multiply(readouts, state[..., None, :, :, :])[..., 0].sum(dim=-1)
    return y.flatten(-2).to(u.dtype), state


diagonal_ssm_stepper = stepper_of(diagonal_ssm_step)


def _tables(
    log_a: Float[Tensor, "#channel mode 2"], length: int, first: int
) -> tuple[Float[Tensor, "#channel mode inner 2"], Float[Tensor, "#channel mode outer 2"]]:
    """Powers 0 .. J-1, and the powers first, first + J, ... that cover the length."""
    size = 1 << (max(length - 1, 0).bit_length() + 1) // 2
    inner = torch.arange(size, device=log_a.device)
    outer = torch.arange(first, first + length, size, device=log_a.device)
    return powers_of(log_a, inner).to(log_a.dtype), powers_of(log_a, outer).to(log_a.dtype)


def _readout(
    weight: Float[Tensor, "*batch channel mode 2"],
    inner: Float[Tensor, "#channel mode inner 2"],
    outer: Float[Tensor, "#channel mode outer 2"],
) -> Float[Tensor, "*batch channel length"]:
    r"""Signal :math:`2\,\mathrm{Re} \sum_n w_n a_n^t` for all t that the two tables cover.

    It is a filter, so it is exact also where PyTorch rounds the factors of products.
    """
    scaled = 2 * multiply(weight[..., None, :], outer)
    left = torch.cat(conjugate(scaled).unbind(-1), dim=-2).mT  # (*batch, channel, outer, 2 mode)
    right = torch.cat(inner.unbind(-1), dim=-2)  # (channel, 2 mode, inner)
    if rounds_products():
        return (precise(left) @ precise(right)).flatten(-2).to(left.dtype)
    return (left @ right).flatten(-2)


def _driven(
    u: Float[Tensor, "*batch length channel"], log_a: Float[Tensor, "#channel mode 2"]
) -> Float[Tensor, "*batch channel mode 2"]:
    r"""State after the inputs, from the zero state, for b = 1: :math:`\sum_t a^{L-1-t} u_t`."""
    length = u.shape[-2]
    inner, outer = (table.to(u.dtype) for table in _tables(log_a, length, first=0))
    size, count = inner.shape[-2], outer.shape[-2]
    early = pad(u, (0, 0, size * count - length, 0))  # leading zeros do not change the state
    blocks = early.mT.unflatten(-1, (count, size))  # (*batch, channel, outer, inner)
    real, imag = (blocks @ inner[..., plane].flip(-1).mT for plane in (0, 1))
    partial = torch.stack([real, imag], dim=-1)  # (*batch, channel, outer, mode, 2)
    return multiply(partial, outer.flip(-2).transpose(1, 2)).sum(dim=-3)
