"""Local attention of few queries, as in decoding, in the kernel of attention compiled by numba."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.attention import AttentionMask
from stateline.ops.attention import numba_backend as attention
from stateline.ops.local_attention import LocalWindow

MOST = 32
"""Rows times heads up to which the kernel is 1.6 to 10 times as fast; 128 took 0.3 to 1.2 times as
long as products of matrices."""


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernel cannot run this call, or an empty string."""
    q, k, v, window, dropout = inputs
    if any(part is not None for part in (window.bias, window.position_keys, window.block_len)):
        return "the numba kernel has plain sliding windows, without biases and keys by distance"
    mask = AttentionMask(soft_cap=window.soft_cap)
    if not attention.takes_steps(q, k, v, mask):
        return f"the numba kernel takes up to {attention.FEW_QUERIES} queries without gradients"
    return attention.can_use("attention", q, k, v, mask, dropout)


def gains(function: str, *inputs: Any) -> bool:  # noqa: ARG001
    """Whether a call is faster here: a few rows and heads."""
    return len(inputs[0]) * inputs[0].shape[2] <= MOST


def local_attention(q: Tensor, k: Tensor, v: Tensor, window: LocalWindow, dropout: float) -> Tensor:  # noqa: ARG001
    """Attend to the slots of each window, in one pass."""
    rows, length, heads = q.shape[:3]
    start = torch.full((rows,), k.shape[1] - length)
    windows = torch.full((heads,), window.size)
    mask = AttentionMask(start, None, windows, window.first, window.soft_cap)
    return attention.of_few(q, k, v, mask)
