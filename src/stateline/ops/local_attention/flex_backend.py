"""Local attention by PyTorch's FlexAttention, compiled: blocks outside of the window are skipped.

The mask of the window depends only on sizes and is cached. First slots and phases, which differ
between rows, and biases by distance are changes of the scores.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from stateline.ops import third_party
from stateline.ops.attention.flex_backend import MASKS, can_take, capped, in_turn, run
from stateline.ops.dispatch import wants_gradient
from stateline.ops.local_attention import LocalWindow

BLOCK = 128
"""Queries and slots per block of FlexAttention's kernel."""

available = third_party.no_device


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernel cannot run this call, or an empty string."""
    q, k, v, window, dropout = inputs
    if dropout:
        return "FlexAttention has no dropout"
    if window.position_keys is not None:
        return "FlexAttention has no keys by distance"
    if window.bias is not None and wants_gradient(window.bias):
        return "FlexAttention sums up the gradient of a bias in an order that varies"
    return can_take(q, k, v)


def local_attention(q: Tensor, k: Tensor, v: Tensor, window: LocalWindow, dropout: float) -> Tensor:  # noqa: ARG001
    """Skip blocks by the mask, and change the scores of the others."""
    ahead = k.shape[1] - q.shape[1]
    mask = window_mask(q.shape[1], k.shape[1], window.size, q.device)
    return run(q, k, v, _change(ahead, window), mask)


@lru_cache(MASKS)
@torch.inference_mode(False)  # gradients may need it later
def window_mask(length: int, slots: int, window: int, device: torch.device) -> BlockMask:
    """Which slots a query can see, and which blocks of slots a block of queries can see."""
    ahead = slots - length
    query = torch.arange(0, length, BLOCK, device=device)
    low = (ahead + query - window + 1).clamp(min=0) // BLOCK
    high = (ahead + (query + BLOCK).clamp(max=length) - 1) // BLOCK
    block = torch.arange(-(-slots // BLOCK), device=device)
    seen = (block >= low[:, None]) & (block <= high[:, None])
    order = (~seen).int().argsort(dim=1, stable=True).int()
    return BlockMask.from_kv_blocks(
        seen.sum(dim=1).int()[None, None],
        order[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda _b, _h, i, j: (j <= ahead + i) & (ahead + i - j < window),
        seq_lengths=(length, slots),
    )


def _change(ahead: int, window: LocalWindow) -> Callable[..., Tensor] | None:
    """The change of the scores, if there is one."""
    size, first, bias, _, block_len, phase, soft_cap = window
    changes = capped(soft_cap)
    if bias is not None:
        table, last = bias.float(), size - 1
        changes.append(lambda s, _b, h, i, j: s + table[h, (ahead + i - j).clamp(0, last)])
    if first is not None:
        changes.append(lambda s, b, _h, _i, j: torch.where(j >= first[b], s, -math.inf))
    if block_len is not None and phase is not None:
        most = size - block_len
        changes.append(
            lambda s, b, _h, i, j: torch.where(
                ahead + i - j <= most + (phase[b] + i) % block_len, s, -math.inf
            )
        )
    return in_turn(changes)
