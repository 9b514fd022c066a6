"""Local attention by blocks of queries, each with the slots that its windows cover."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.attention.pytorch import (
    MANY_SCORES,
    SCORES_PER_BLOCK,
    capped_,
    grouped,
    heads_first,
    product,
)
from stateline.ops.kernel_op import KernelOp, values_at_hand
from stateline.ops.local_attention import LocalWindow

LEAST_BLOCK = 32
"""Minimum number of queries in a block; smaller matrix products are slow.

On a CPU it is also the maximum: a block of n queries computes n + w - 1 scores per query, of which
w are needed.
"""

_softmax_backward = torch.ops.aten._softmax_backward_data  # one fused pass

Block = tuple[slice, slice, slice]
"""Rows, queries and slots."""


def local_attention(q: Tensor, k: Tensor, v: Tensor, window: LocalWindow, dropout: float) -> Tensor:
    """Save only the inputs; the backward pass recomputes the weights, unless some are dropped."""
    if dropout:
        return _by_blocks(q, k, v, window, dropout)
    return _recomputed(q, k, v, window)


def _forward(q: Tensor, k: Tensor, v: Tensor, window: LocalWindow) -> Tensor:
    return _by_blocks(q, k, v, window, 0.0)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, window: LocalWindow, dropout: float) -> Tensor:
    y = torch.empty_like(q)
    dtype = torch.promote_types(q.dtype, torch.float32)
    free, k, v = _free(k, v, window.first)
    inputs = q.to(dtype) * q.shape[-1] ** -0.5, k.to(dtype), v.to(dtype)
    queries, keys, values = (t.transpose(1, 2) for t in inputs)
    table, far = _table(q, k, window), _far_first(q, k, window)
    for block in _blocks(q, k, window.size):
        rows, times, slots = block
        mask, blind = _mask(table, block, free, window)
        q_b, k_b, v_b = queries[rows, :, times], keys[rows, :, slots], values[rows, :, slots]
        if q.device.type == "cpu" and window.soft_cap is None:  # others restrict the mask
            if far is not None:
                mask = mask + _by_slot(q_b @ far.mT, mask.shape[-1])
            y_b = F.scaled_dot_product_attention(
                q_b, k_b, v_b, mask, dropout, scale=1.0, enable_gqa=True
            )
        else:
            weights = _scores(q_b, k_b, far, window.soft_cap).add_(mask).softmax(dim=-1)
            y_b = product(F.dropout(weights, dropout), v_b)
        y[rows, times] = y_b.masked_fill_(blind, 0.0).transpose(1, 2).to(y.dtype)
    return y


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, window: LocalWindow) -> Any:
    """Recompute the weights P = softmax(S) of each block; dS = P (dP - sum P dP).

    With a soft cap c, that of the scores before it is (1 - (S / c)^2) dS.
    """
    free, k, v = _free(k, v, window.first)
    queries, keys, values, grads = heads_first(q, k, v, grad)
    queries = queries * q.shape[-1] ** -0.5
    grad_q, grad_k, grad_v = (torch.zeros_like(t) for t in (queries, keys, values))
    table, far = _table(q, k, window), _far_first(q, k, window)
    grad_table = torch.zeros_like(table)
    grad_far = None if far is None else torch.zeros_like(far)
    for block in _blocks(q, k, window.size):
        rows, times, slots = block
        mask, blind = _mask(table, block, free, window)
        q_b, k_b, v_b = queries[rows, :, times], keys[rows, :, slots], values[rows, :, slots]
        g_b = grads[rows, :, times].masked_fill(blind, 0.0)
        scores = _scores(q_b, k_b, far, window.soft_cap)
        weights = (scores + mask).softmax(dim=-1)
        grad_scores = _softmax_backward(product(g_b, v_b.mT), weights, -1, weights.dtype)
        if window.bias is not None:
            _part(grad_table, block).add_(grad_scores.sum(dim=0))
        if window.soft_cap is not None:
            grad_scores = grad_scores * (1 - (scores / window.soft_cap).square_())
        grad_q[rows, :, times] = product(grad_scores, k_b)
        n = k.shape[2]
        grad_k[rows, :, slots].add_(grouped(grad_scores, n).mT @ grouped(q_b, n))
        grad_v[rows, :, slots].add_(grouped(weights, n).mT @ grouped(g_b, n))
        if far is not None and grad_far is not None:
            by_distance = _by_distance(grad_scores, len(far))
            grad_q[rows, :, times].add_(by_distance @ far)
            grad_far.add_((by_distance.mT @ q_b).sum(dim=(0, 1)))
    grad_q *= q.shape[-1] ** -0.5
    found = LocalWindow(0)
    if window.bias is not None:
        of_bias = torch.zeros_like(window.bias, dtype=table.dtype)
        reach, _, _ = _sizes(q, k, window.size)
        of_bias[:, :reach] = _by_distance(grad_table, reach).sum(dim=-2).flip(-1)
        found = found._replace(bias=of_bias)
    if window.position_keys is not None and grad_far is not None:
        of_keys = torch.zeros_like(window.position_keys, dtype=table.dtype)
        of_keys[: len(grad_far)] = grad_far.flip(0)
        found = found._replace(position_keys=of_keys)
    return *(g.transpose(1, 2) for g in (grad_q, grad_k, grad_v)), found


def _sizes(q: Tensor, k: Tensor, window: int) -> tuple[int, int, int]:
    """Number of slots that a query can see, of queries in a block, and of rows in a block."""
    (batch, length, n_heads), slots = q.shape[:3], k.shape[1]
    reach = max(1, min(window, slots))
    budget = SCORES_PER_BLOCK.get(q.device.type, MANY_SCORES) // n_heads
    many = 0 if q.device.type == "cpu" else min(reach, budget // (2 * reach))
    n_times = max(1, min(length, max(LEAST_BLOCK, many)))
    return reach, n_times, max(1, min(batch, budget // (n_times * (n_times + reach))))


def _blocks(q: Tensor, k: Tensor, window: int) -> Iterator[Block]:
    """Blocks of rows and queries, each with the slots that its windows cover."""
    (batch, length), slots = q.shape[:2], k.shape[1]
    reach, n_times, n_rows = _sizes(q, k, window)
    for start in range(0, length, n_times):
        times = slice(start, min(start + n_times, length))
        seen = slice(max(0, slots - length + times.start - reach + 1), slots - length + times.stop)
        for row in range(0, batch, n_rows):
            yield slice(row, row + n_rows), times, seen


def _free(k: Tensor, v: Tensor, first: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor]:
    """Mask of invalid slots to add to the scores (row, slot); keys and values with zeros there.

    Their contents are finite, but scores computed from them could overflow.
    """
    if first is None or (values_at_hand(first) and not (first > 0).any()):
        return None, k, v
    dtype = torch.promote_types(k.dtype, torch.float32)
    held = torch.arange(k.shape[1], device=k.device) >= first[:, None]
    ones = held[..., None, None].to(k.dtype)  # a product is several times as fast as masked_fill
    return (held.to(dtype) - 1) * -_lowest(dtype), k * ones, v * ones


def _table(q: Tensor, k: Tensor, window: LocalWindow) -> Tensor:
    """Mask and bias that are added to the scores of any block: (head or 1, query, slot).

    Slots outside the window get a very low number, finite because a query may see no slot at all.
    The table is for a full block of n queries and n + w - 1 slots; smaller blocks use a part of it.
    """
    reach, n_times, _ = _sizes(q, k, window.size)
    dtype = torch.promote_types(q.dtype, torch.float32)
    if window.bias is None:
        by_distance = torch.zeros(1, reach, dtype=dtype, device=q.device)
    else:
        by_distance = window.bias[:, :reach].flip(-1).to(dtype).clamp(min=_lowest(dtype))
    every = by_distance[:, None].expand(-1, n_times, -1)
    return _by_slot(every, n_times + reach - 1, _lowest(dtype))


def _lowest(dtype: torch.dtype) -> float:
    """Score of hidden slots; the sum of four is still finite."""
    return torch.finfo(dtype).min / 4


def _part(table: Tensor, block: Block) -> Tensor:
    """Part of the table for the queries and slots of a block."""
    _, times, slots = block
    n_times, n_slots = times.stop - times.start, slots.stop - slots.start
    stop = n_times + table.shape[-1] - table.shape[-2]
    return table[:, :n_times, stop - n_slots : stop]


def _mask(
    table: Tensor, block: Block, free: Tensor | None, window: LocalWindow
) -> tuple[Tensor, Tensor]:
    """Mask to add to the scores (row or 1, head or 1, query, slot); queries that see no slot."""
    rows, times, slots = block
    mask, lowest = _part(table, block)[None], _lowest(table.dtype)
    if free is not None:
        mask = mask + free[rows, None, None, slots]
    if window.block_len is not None and window.phase is not None:
        time = torch.arange(times.start, times.stop, device=table.device)
        slot = torch.arange(slots.start, slots.stop, device=table.device)
        distance = time[:, None] + slots.stop - times.stop - slot
        place = (window.phase[rows, None] + time) % window.block_len
        away = distance > (window.size - window.block_len + place)[:, None, :, None]
        mask = mask.masked_fill(away, lowest)
    return mask, mask.amax(dim=-1, keepdim=True) <= lowest / 2


def _scores(q: Tensor, k: Tensor, far: Tensor | None, soft_cap: float | None) -> Tensor:
    """Scores of the slots for each query of a block, before the mask."""
    scores = product(q, k.mT)
    if far is not None:
        scores += _by_slot(q @ far.mT, scores.shape[-1])
    return capped_(scores, soft_cap)


def _far_first(q: Tensor, k: Tensor, window: LocalWindow) -> Tensor | None:
    """Keys by distance, the largest distance first: the order of the slots."""
    if window.position_keys is None:
        return None
    dtype = torch.promote_types(q.dtype, torch.float32)
    return window.position_keys[: _sizes(q, k, window.size)[0]].flip(0).to(dtype)


def _by_slot(scores: Tensor, n_slots: int, beyond: float = 0.0) -> Tensor:
    """Skew (query, distance), largest distance first, to (query, slot); fill with ``beyond``.

    By padding and reshaping (Transformer-XL's relative shift): rows of n + w numbers, of which the
    first w are given, read as rows of n + w - 1, shift by one from query to query.
    """
    n_times, reach = scores.shape[-2:]
    n_all = n_times + reach - 1
    flat = F.pad(scores, (0, n_times), value=beyond).flatten(-2)[..., : n_times * n_all]
    return flat.unflatten(-1, (n_times, n_all))[..., n_all - n_slots :]


def _by_distance(scores: Tensor, reach: int) -> Tensor:
    """Inverse of :func:`_by_slot`."""
    n_times, n_slots = scores.shape[-2:]
    n_all = n_times + reach - 1
    flat = F.pad(scores, (n_all - n_slots, 0)).flatten(-2)
    return F.pad(flat, (0, n_times)).unflatten(-1, (n_times, n_all + 1))[..., :reach]


_recomputed = KernelOp("local_attention", _forward, _backward, lambda q, *_: torch.empty_like(q))
