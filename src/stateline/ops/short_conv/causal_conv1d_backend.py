"""Short causal convolution by the package causal-conv1d."""

from typing import Any

import torch
from causal_conv1d import causal_conv1d_fn
from torch import Tensor

from stateline.ops import third_party

TAPS = (2, 3, 4)
"""Numbers of taps that the package's kernel is compiled for."""

ALIGNED = 8
"""The number of channels must be a multiple of this if channels are adjacent in memory."""

available = third_party.no_device


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernel cannot run this call, or an empty string."""
    u, kernel = inputs[:2]
    if u.ndim != 3 or len(kernel) != u.shape[-1]:
        return "causal-conv1d takes a batch of signals and one filter for each channel"
    if kernel.shape[1] not in TAPS:
        return "causal-conv1d takes 2, 3 or 4 taps"
    if u.shape[-1] % ALIGNED:
        return f"causal-conv1d takes a multiple of {ALIGNED} channels"
    return third_party.can_use(third_party.SINGLE, u, kernel)


def short_conv(u: Tensor, kernel: Tensor, starts: Tensor | None = None) -> Tensor:
    """Run the package's kernel; its last weight belongs to the newest input.

    With documents, it takes their numbers, and channels that are adjacent in memory.
    """
    numbers = None if starts is None else starts.cumsum(1, dtype=torch.int32)
    return causal_conv1d_fn(u.contiguous().mT, kernel.flip(-1).contiguous(), seq_idx=numbers).mT
