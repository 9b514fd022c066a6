"""Local attention in blocks of queries, each with the slots that its windows reach."""

from collections.abc import Iterator

import torch
from torch import Tensor

from stateline.ops.attention.pytorch import MANY_SCORES, SCORES_PER_BLOCK, heads_first
from stateline.ops.library import define_op

LEAST_BLOCK = 32
"""Queries in a block at least: fewer would make the products of matrices slow."""


def local_attention(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    first: Tensor | None,
    bias: Tensor | None,
    position_keys: Tensor | None,
    phase: Tensor | None,
    block_len: int,
) -> Tensor:
    """Recompute the weights in the backward pass: nothing but the inputs is kept."""
    return _local_attention(q, k, v, bias, position_keys, first, phase, window, block_len)


def _forward(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    position_keys: Tensor | None,
    first: Tensor | None,
    phase: Tensor | None,
    window: int,
    block_len: int,
) -> Tensor:
    y = torch.empty_like(q)
    queries, keys, values = heads_first(q, k, v)
    for rows, times, slots in _blocks(q, k, window):
        distance = _distance(q, k, times, slots)
        hidden = _hidden(distance, slots, first, rows, window)
        if phase is not None:
            hidden = hidden | _blocks_away(distance, times, phase[rows], window, block_len)
        q_b = queries[rows, :, times]
        weights = _weights(q_b, keys[rows, :, slots], distance, hidden, bias, position_keys)
        y[rows, times] = (weights @ values[rows, :, slots]).transpose(1, 2).to(y.dtype)
    return y


def _backward(  # noqa: PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    position_keys: Tensor | None,
    first: Tensor | None,
    phase: Tensor | None,
    window: int,
    block_len: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Recompute the weights P = softmax(S) of each block; dS = P (dP - dy y)."""
    queries, keys, values, grads = heads_first(q, k, v, grad)
    grad_q, grad_k, grad_v = (torch.zeros_like(t) for t in (queries, keys, values))
    grad_bias = queries.new_zeros(0 if bias is None else bias.shape)
    grad_p = queries.new_zeros(0 if position_keys is None else position_keys.shape)
    scale = q.shape[-1] ** -0.5
    for rows, times, slots in _blocks(q, k, window):
        distance = _distance(q, k, times, slots)
        hidden = _hidden(distance, slots, first, rows, window)
        if phase is not None:
            hidden = hidden | _blocks_away(distance, times, phase[rows], window, block_len)
        q_b, k_b, v_b = queries[rows, :, times], keys[rows, :, slots], values[rows, :, slots]
        g_b = grads[rows, :, times]
        weights = _weights(q_b, k_b, distance, hidden, bias, position_keys)
        along = (g_b * (weights @ v_b)).sum(dim=-1, keepdim=True)
        grad_scores = (g_b @ v_b.mT).sub_(along).mul_(weights)
        grad_q[rows, :, times] += scale * (grad_scores @ k_b)
        grad_k[rows, :, slots] += scale * (grad_scores.mT @ q_b)
        grad_v[rows, :, slots] += weights.mT @ g_b
        if bias is None and position_keys is None:
            continue
        by_distance = _by_distance(grad_scores, distance, window)
        if bias is not None:
            grad_bias += by_distance.sum(dim=(0, 2))
        if position_keys is not None:
            grad_q[rows, :, times] += scale * (by_distance @ position_keys.to(q_b.dtype))
            grad_p += scale * torch.einsum("rhtw,rhtd->wd", by_distance, q_b)
    heads_second = zip((grad_q, grad_k, grad_v), (q, k, v), strict=True)
    grad_q, grad_k, grad_v = (g.transpose(1, 2).to(t.dtype).contiguous() for g, t in heads_second)
    return grad_q, grad_k, grad_v, grad_bias, grad_p


def _blocks(q: Tensor, k: Tensor, window: int) -> Iterator[tuple[slice, slice, slice]]:
    """Blocks of rows and queries, each with the slots that its windows reach."""
    (batch, length, n_heads), slots = q.shape[:3], k.shape[1]
    window = max(1, min(window, slots))
    budget = SCORES_PER_BLOCK.get(q.device.type, MANY_SCORES) // n_heads
    n_times = max(1, min(length, max(LEAST_BLOCK, min(window, budget // (2 * window)))))
    n_rows = max(1, min(batch, budget // (n_times * (n_times + window))))
    for start in range(0, length, n_times):
        times = slice(start, min(start + n_times, length))
        seen = slice(max(0, slots - length + times.start - window + 1), slots - length + times.stop)
        for row in range(0, batch, n_rows):
            yield slice(row, row + n_rows), times, seen


def _distance(q: Tensor, k: Tensor, times: slice, slots: slice) -> Tensor:
    """How far each slot of a block lies behind each query."""
    query = torch.arange(times.start, times.stop, device=q.device) + k.shape[1] - q.shape[1]
    return query[:, None] - torch.arange(slots.start, slots.stop, device=q.device)


def _hidden(
    distance: Tensor, slots: slice, first: Tensor | None, rows: slice, window: int
) -> Tensor:
    """Slots that a query does not see: (row, or 1 without first; 1; query; slot)."""
    hidden = ((distance < 0) | (distance >= window))[None, None]
    if first is None:
        return hidden
    slot = torch.arange(slots.start, slots.stop, device=distance.device)
    return hidden | (slot < first[rows, None, None, None])


def _blocks_away(
    distance: Tensor, times: slice, phase: Tensor, window: int, block_len: int
) -> Tensor:
    """Slots of blocks that are too far back: (row, 1, query, slot)."""
    time = torch.arange(times.start, times.stop, device=phase.device)
    place = (phase[:, None] + time) % block_len
    return distance > (window - block_len + place)[:, None, :, None]


def _weights(
    q: Tensor,
    k: Tensor,
    distance: Tensor,
    hidden: Tensor,
    bias: Tensor | None,
    position_keys: Tensor | None,
) -> Tensor:
    """Weights of the slots for each query of a block; all zero where none is seen."""
    q = q * q.shape[-1] ** -0.5
    scores = q @ k.mT
    if position_keys is not None:
        keys = position_keys.to(q.dtype)
        index = distance.clamp(0, keys.shape[0] - 1).expand_as(scores)
        scores = scores + (q @ keys.mT).gather(-1, index)
    if bias is not None:
        scores = scores + bias.to(q.dtype)[:, distance.clamp(0, bias.shape[1] - 1)]
    scores = scores.masked_fill_(hidden, float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(largest).exp_()
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def _by_distance(scores: Tensor, distance: Tensor, window: int) -> Tensor:
    """The same numbers by distance instead of slot; zero where there is no such slot."""
    far = torch.arange(window, device=scores.device)
    slot = distance[:, :1] - far  # of each query and distance: distance[:, :1] is that of slot 0
    outside = (slot < 0) | (slot >= scores.shape[-1])
    index = slot.clamp(0, scores.shape[-1] - 1).expand(*scores.shape[:-1], window)
    return scores.gather(-1, index).masked_fill(outside, 0.0)


_local_attention = define_op("local_attention", _forward, _backward)
