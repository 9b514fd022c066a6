"""Short causal convolution: a sum of delayed signals, on any device."""

import torch
from torch import Tensor

from stateline.ops.fft_conv.pytorch import fft_conv
from stateline.ops.library import define_op

TAPS_BY_FFT = 16
"""From this many taps on, the FFT is faster than a pass over the signal for each tap."""


def _forward(u: Tensor, kernel: Tensor) -> Tensor:
    y = torch.zeros_like(u, dtype=torch.promote_types(u.dtype, torch.float32))
    for delay in range(min(kernel.shape[1], u.shape[-2])):
        y[..., delay:, :].addcmul_(u[..., : u.shape[-2] - delay, :], kernel[:, delay])
    return y.to(u.dtype)


def _backward(grad: Tensor, u: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Advance the output gradient tap by tap, and multiply it with the delayed signal."""
    length, dtype = u.shape[-2], torch.promote_types(u.dtype, torch.float32)
    grad, signal = grad.to(dtype), u.to(dtype)
    grad_u, grad_kernel = torch.zeros_like(signal), torch.zeros_like(kernel)
    for delay in range(min(kernel.shape[1], length)):
        later = grad[..., delay:, :]
        grad_u[..., : length - delay, :].addcmul_(later, kernel[:, delay])
        product = later * signal[..., : length - delay, :]
        grad_kernel[:, delay] = product.flatten(0, -2).sum(dim=0)
    return grad_u.to(u.dtype), grad_kernel


_by_taps = define_op("short_conv", _forward, _backward)


def short_conv(u: Tensor, kernel: Tensor) -> Tensor:
    """Sum the delayed signals; a longer kernel goes through the FFT."""
    if kernel.shape[1] >= TAPS_BY_FFT:
        return fft_conv(u, kernel)
    filters = len(kernel) // u.shape[-1]
    return _by_taps(u if filters == 1 else u.tile(filters), kernel)
