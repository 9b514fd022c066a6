"""Causal convolution by PyTorch's FFT, on any device."""

import torch
from torch import Tensor

from stateline.ops.kernel_op import KernelOp


def _forward(u: Tensor, kernel: Tensor) -> Tensor:
    if not u.numel():  # MKL refuses an empty FFT
        return u.new_zeros(*u.shape[:-1], len(kernel))
    u_f, k_f, n = _spectra(u, kernel)
    y = torch.fft.irfft(u_f * k_f, n=n)[..., : u.shape[-2]]
    return y.flatten(-3, -2).mT.to(u.dtype).contiguous()


def _backward(grad: Tensor, u: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Correlate the output gradient with the kernel and with the signal.

    Conjugates are computed physically: ``conj()`` only sets a flag, which PyTorch ignores inside an
    operator that runs in a compiled graph.
    """
    if not u.numel():
        return torch.zeros_like(u), torch.zeros_like(kernel)
    length, taps = u.shape[-2], kernel.shape[1]
    u_f, k_f, n = _spectra(u, kernel)
    g_f = torch.fft.rfft(grad.to(_compute_dtype(u)).mT.unflatten(-2, k_f.shape[:-1]), n=n)
    grad_u = torch.fft.irfft((g_f * k_f.conj_physical()).sum(dim=-3), n=n)[..., :length]
    products = g_f.conj_physical_() * u_f
    summed = products.reshape(-1, *k_f.shape).sum(dim=0)  # batch rows share the kernel
    grad_kernel = torch.fft.irfft(summed.conj_physical_(), n=n).flatten(0, 1)
    grad_kernel = grad_kernel[:, : min(taps, length)]
    missing = taps - grad_kernel.shape[1]
    return grad_u.mT, torch.nn.functional.pad(grad_kernel, (0, missing))


def _spectra(u: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor, int]:
    """Spectra of signal and kernel, padded so that products do not wrap; length of the FFT."""
    length, channels = u.shape[-2:]
    taps = kernel[:, :length].to(_compute_dtype(u)).unflatten(0, (-1, channels))
    n = _fast_length(length + taps.shape[-1] - 1)
    return torch.fft.rfft(u.to(taps.dtype).mT, n=n).unsqueeze(-3), torch.fft.rfft(taps, n=n), n


def _compute_dtype(u: Tensor) -> torch.dtype:
    """At least float32: half-precision FFTs need CUDA and powers of two."""
    return torch.promote_types(u.dtype, torch.float32)


def _fast_length(n: int) -> int:
    """Smallest even number >= ``n`` without prime factors above 5, which slow down an FFT."""
    n += n % 2
    while True:
        rest = n
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return n
        n += 2


def _fake(u: Tensor, kernel: Tensor) -> Tensor:
    return u.new_empty(*u.shape[:-1], len(kernel))


fft_conv = KernelOp("fft_conv", _forward, _backward, _fake)
