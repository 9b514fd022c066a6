"""Causal convolution by FlashFFTConv, for comparisons: ``auto`` never chooses it.

It has not been maintained since 2024, and computes in half precision. Its convolution is circular,
so that its transform is at least twice as long as the signal.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from flashfftconv import FlashFFTConv
from torch import Tensor, nn

from stateline.ops import third_party

MOST_POINTS = 1 << 22
MANY_POINTS = 1 << 15
"""Beyond these, the number of channels must be a multiple of 16."""

available = third_party.no_device


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernel cannot run this call, or an empty string."""
    u, kernel = inputs
    length, channels = u.shape[-2:]
    points = _points(length)
    if len(kernel) != channels:
        return "FlashFFTConv takes one filter per channel"
    if length % 4:
        return "FlashFFTConv takes lengths that are a multiple of 4"
    if points > MOST_POINTS:
        return f"FlashFFTConv transforms up to {MOST_POINTS} points"
    if points > MANY_POINTS and channels % 16:
        return f"beyond {MANY_POINTS} points, FlashFFTConv takes a multiple of 16 channels"
    return third_party.can_use(third_party.HALVES, u)


def fft_conv(u: Tensor, kernel: Tensor) -> Tensor:
    """Run their module, with channels first and the kernel in float32."""
    length, channels = u.shape[-2:]
    signal = u.reshape(-1, length, channels).mT.contiguous()
    taps = kernel[:, :length].float()
    taps = F.pad(taps, (0, length - taps.shape[1])).contiguous()
    return _module(_points(length), u.dtype, u.device)(signal, taps).mT.reshape(u.shape)


def _points(length: int) -> int:
    return max(256, 1 << (2 * length - 1).bit_length())


@cache
def _module(points: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    module: nn.Module = FlashFFTConv(points, dtype=dtype).to(device)
    return module
