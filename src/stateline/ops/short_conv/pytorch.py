"""Short causal convolution: a sum of delayed signals, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.fft_conv import fft_conv
from stateline.ops.kernel_op import KernelOp
from stateline.ops.stepping import Stepper, copying

FFT_TAPS = 16
"""Taps at which the FFT becomes faster than a sum of delayed signals."""


def _forward(u: Tensor, kernel: Tensor) -> Tensor:
    y = torch.zeros_like(u, dtype=torch.promote_types(u.dtype, torch.float32))
    for delay in range(min(kernel.shape[1], u.shape[-2])):
        y[..., delay:, :].addcmul_(u[..., : u.shape[-2] - delay, :], kernel[:, delay])
    return y.to(u.dtype)


def _backward(grad: Tensor, u: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Correlate the output gradient with the kernel and with the signal, tap by tap."""
    length, dtype = u.shape[-2], torch.promote_types(u.dtype, torch.float32)
    grad, signal = grad.to(dtype), u.to(dtype)
    grad_u, grad_kernel = torch.zeros_like(signal), torch.zeros_like(kernel)
    for delay in range(min(kernel.shape[1], length)):
        later = grad[..., delay:, :]
        grad_u[..., : length - delay, :].addcmul_(later, kernel[:, delay])
        product = later * signal[..., : length - delay, :]
        grad_kernel[:, delay] = product.flatten(0, -2).sum(dim=0)
    return grad_u, grad_kernel


_by_taps = KernelOp("short_conv", _forward, _backward, lambda u, _: torch.empty_like(u))


def short_conv(u: Tensor, kernel: Tensor, starts: Tensor | None = None) -> Tensor:
    """Sum the delayed signals; call ``fft_conv`` for longer kernels."""
    if starts is not None:
        return _inside(u, kernel, starts)
    if kernel.shape[1] >= FFT_TAPS:
        return fft_conv(u, kernel)
    filters = len(kernel) // u.shape[-1]
    return _by_taps(u if filters == 1 else u.tile(filters), kernel)


def _inside(u: Tensor, kernel: Tensor, starts: Tensor) -> Tensor:
    """Sum the delayed signals of the same document."""
    filters, length = len(kernel) // u.shape[-1], u.shape[-2]
    signal = u.to(torch.promote_types(u.dtype, torch.float32)).tile(filters)
    document = starts.cumsum(-1)
    y = signal * kernel[:, 0]
    for delay in range(1, min(kernel.shape[1], length)):
        same = document[..., delay:] == document[..., :-delay]
        delayed = signal[..., :-delay, :] * kernel[:, delay] * same[..., None]
        y = y + F.pad(delayed, (0, 0, delay, 0))
    return y.to(u.dtype)


def short_conv_step(u: Tensor, weights: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh the latest inputs by the taps."""
    reach = torch.cat([past, u[:, None].to(past.dtype)], dim=1)
    return torch.cat([(reach * taps).sum(dim=1) for taps in weights], dim=-1), reach[:, 1:]


def short_conv_stepper(weights: Tensor) -> Stepper:
    """Weigh the latest inputs by the taps, and move the remaining inputs by one place."""
    return copying(lambda u, past: short_conv_step(u, weights[None], past))
