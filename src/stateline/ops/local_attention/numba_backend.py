"""Local attention in the kernels of attention compiled by numba: no scores in memory."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.attention import AttentionMask
from stateline.ops.attention import numba_backend as attention
from stateline.ops.local_attention import LocalWindow
from stateline.ops.numba_common.vector import LANES


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernel cannot run this call, or an empty string."""
    q, k, v, window, dropout = inputs
    if window.bias is not None or window.block_len is not None:
        return "the numba kernel has plain sliding windows, without biases and blocks"
    return attention.can_use("attention", q, k, v, _mask(q, k, window), dropout)


def gains(function: str, *inputs: Any) -> bool:  # noqa: ARG001
    """Whether a call is faster here: where vectors lie along queries, or along long heads.

    Few queries leave vectors empty that lie along them, as with keys by distance. Without these,
    vectors lie along heads; sums over a head of one vector cost more than products of matrices,
    unless the call is so small that its start is what counts.
    """
    q, k, _, window, _ = inputs
    if q.shape[1] > attention.FEW_QUERIES:
        return True
    small = q.numel() * k.shape[1] < attention.LEAST
    return window.position_keys is None and (small or q.shape[-1] > LANES)


def local_attention(q: Tensor, k: Tensor, v: Tensor, window: LocalWindow, dropout: float) -> Tensor:  # noqa: ARG001
    """Attend to the slots of each window, in one pass."""
    mask, keys = _mask(q, k, window), window.position_keys
    if keys is None and attention.takes_steps(q, k, v, mask):
        return attention.of_few(q, k, v, mask._replace(first=window.first))
    if window.first is not None:
        mask = mask._replace(first=window.first[:, None].expand(q.shape[:2]))
    return attention.of_many(q, k, v, mask, None if keys is None else keys[: k.shape[1]])


def _mask(q: Tensor, k: Tensor, window: LocalWindow) -> AttentionMask:
    """The window as the kernels take it, without first slots."""
    rows, length, heads = q.shape[:3]
    start = torch.full((rows,), k.shape[1] - length, device=q.device)
    windows = torch.full((heads,), window.size, device=q.device)
    return AttentionMask(start, None, windows, None, window.soft_cap)
