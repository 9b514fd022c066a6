r"""Causal convolution by a Fourier transform of matrix products.

A transform of length :math:`N = m n` is m-point transforms of every n-th entry, a product with the
twiddle factors :math:`e^{-2 \pi i\, j k / N}`, and n-point transforms (Cooley and Tukey). Here
every short transform is one product with the Fourier matrix, so that all work is done by matrix
units where there are some. PyTorch's FFT is faster on processors.

Complex numbers are pairs of real tensors.

References:
    Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 4.1 (block FFT).
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.kernel_op import define_kernel_op

RADIX = 16
"""Length of the short transforms: the size of matrix units."""

Pair = tuple[Tensor, Tensor]


def block_transform(x: Pair, factors: Sequence[int]) -> Pair:
    r"""Discrete Fourier transform along the last axis.

    .. math:: X_k = \sum_j x_j\, e^{-2 \pi i\, j k / N}

    Args:
        x: Real and imaginary part, (..., N).
        factors: Lengths of the short transforms, in any order; their product is N.

    Returns:
        Real and imaginary part of the transform.

    Example:
        >>> impulse = torch.eye(6)[0], torch.zeros(6)
        >>> block_transform(impulse, (2, 3))[0].tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    first, *others = factors
    if not others:
        return _times(x, _roots(first, first, first, x[0]))
    rest = math.prod(others)
    real, imag = (part.unflatten(-1, (first, rest)).mT for part in x)
    real, imag = (part.mT for part in _times((real, imag), _roots(first, first, first, real)))
    turned = _multiply((real, imag), _roots(first, rest, first * rest, real))
    real, imag = block_transform(turned, others)
    return real.mT.flatten(-2), imag.mT.flatten(-2)


def factorise(least: int) -> list[int]:
    """Factors of the shortest power of two from ``least`` on, as many of them ``RADIX`` as fit."""
    bits, each = max(1, (least - 1).bit_length()), RADIX.bit_length() - 1
    left = bits % each
    return [RADIX] * (bits // each) + ([1 << left] if left else [])


def _roots(rows: int, columns: int, n: int, like: Tensor) -> Pair:
    """Powers j k of the n-th root of unity with a negative angle, for j rows and k columns."""
    j, k = (torch.arange(size, device=like.device) for size in (rows, columns))
    angle = (j[:, None] * k % n).double() * (-2 * math.pi / n)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _multiply(a: Pair, b: Pair) -> Pair:
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def _times(x: Pair, matrix: Pair) -> Pair:
    """Product of row vectors with a matrix."""
    real = x[0] @ matrix[0] - x[1] @ matrix[1]
    return real, x[0] @ matrix[1] + x[1] @ matrix[0]


def _spectrum(x: Tensor, factors: Sequence[int]) -> Pair:
    """Transform of a real signal along its last axis, padded with zeros."""
    padded = F.pad(x, (0, math.prod(factors) - x.shape[-1]))
    return block_transform((padded, torch.zeros_like(padded)), factors)


def _signal(spectrum: Pair, factors: Sequence[int]) -> Tensor:
    """The real signal that has a spectrum: the transform of the conjugate, over N."""
    real, imag = spectrum
    return block_transform((real, -imag), factors)[0] / math.prod(factors)


def _spectra(u: Tensor, kernel: Tensor) -> tuple[Pair, Pair, list[int]]:
    """Spectra of signal (*batch, 1, channel, N) and kernel (filter, channel, N), and factors."""
    length, channels = u.shape[-2:]
    dtype = torch.promote_types(u.dtype, torch.float32)
    taps = kernel[:, :length].to(dtype).unflatten(0, (-1, channels))
    factors = factorise(length + taps.shape[-1] - 1)
    return _spectrum(u.to(dtype).mT.unsqueeze(-3), factors), _spectrum(taps, factors), factors


def _forward(u: Tensor, kernel: Tensor) -> Tensor:
    u_f, k_f, factors = _spectra(u, kernel)
    y = _signal(_multiply(u_f, k_f), factors)[..., : u.shape[-2]]
    return y.flatten(-3, -2).mT.to(u.dtype).contiguous()


def _backward(grad: Tensor, u: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Correlate the output gradient with the kernel and with the signal."""
    length, taps = u.shape[-2], kernel.shape[1]
    u_f, k_f, factors = _spectra(u, kernel)
    outputs = grad.to(k_f[0].dtype).mT.unflatten(-2, k_f[0].shape[:-1])
    g_f = _spectrum(outputs, factors)
    by_signal = tuple(part.sum(dim=-3) for part in _multiply(g_f, (k_f[0], -k_f[1])))
    grad_u = _signal((by_signal[0], by_signal[1]), factors)[..., :length]
    products = _multiply(g_f, (u_f[0], -u_f[1]))
    summed = [part.reshape(-1, *k_f[0].shape).sum(dim=0) for part in products]
    grad_kernel = _signal((summed[0], summed[1]), factors).flatten(0, 1)[:, : min(taps, length)]
    missing = taps - grad_kernel.shape[1]
    return (
        grad_u.mT.to(u.dtype).contiguous(),
        F.pad(grad_kernel, (0, missing)).to(kernel.dtype),
    )


fft_conv = define_kernel_op("block_fft_conv", _forward, _backward)
