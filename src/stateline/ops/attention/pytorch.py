"""Causal attention by PyTorch's fused kernel; with a mask or a soft cap, by blocks of scores."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stateline.ops.attention import AttentionMask
from stateline.ops.attention import attention as by_any_backend
from stateline.ops.attention.reference import attention as whole
from stateline.ops.attention.reference import step_by
from stateline.ops.kernel_op import KernelOp, values_at_hand

SCORES_PER_BLOCK = {"cpu": 1 << 18}
"""Scores per block by device type; on a CPU, they fit into its cache."""

MANY_SCORES = 1 << 25
"""Scores per block on other devices."""


def attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float) -> Tensor:
    """PyTorch's fused kernel if there is no mask; dropout with all biases or scores in memory."""
    if not dropout and not mask.plain:
        return _masked(q, k, v, mask)
    if mask.soft_cap is not None:
        return whole(q, k, v, mask, dropout)
    bias = None
    if not mask.plain:
        every = slice(0, q.shape[1]), slice(0, k.shape[1])
        bias = _bias(q, *every, mask).to(q.dtype)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch, head, length, d_head)
    grouped = q.shape[1] != k.shape[1]
    y = scaled_dot_product_attention(
        q, k, v, bias, dropout, is_causal=bias is None, enable_gqa=grouped
    )
    return y.transpose(1, 2)


attention_step_ = step_by(by_any_backend)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    y = torch.empty_like(q)
    queries, keys, values = heads_first(q, k, v)
    for rows, times, slots, bias in _blocks(q, k, mask):
        scores = _scores(queries[rows, :, times], keys[rows, :, slots], mask.soft_cap)
        weights = scores.add_(bias).softmax(dim=-1)
        y[rows, times] = product(weights, values[rows, :, slots]).transpose(1, 2).to(y.dtype)
    return y


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Any:
    """Recompute the weights P = softmax(S) of each block; dS = P (dP - sum P dP).

    With a soft cap c, that of the scores before it is (1 - (S / c)^2) dS. The gradient of slope m
    is the sum of -(i - j) dS. Each row of dS sums to zero, so this equals the sum of j dS, which
    needs only the sums of dS over the queries.
    """
    queries, keys, values, grads = heads_first(q, k, v, grad)
    grad_q, grad_k, grad_v = (torch.zeros_like(t) for t in (queries, keys, values))
    grad_slopes = None if mask.slopes is None else queries.new_zeros(mask.slopes.shape)
    slot = torch.arange(k.shape[1], device=k.device, dtype=queries.dtype)
    for rows, times, slots, bias in _blocks(q, k, mask):
        q_b, k_b, v_b = queries[rows, :, times], keys[rows, :, slots], values[rows, :, slots]
        g_b = grads[rows, :, times]
        scores = _scores(q_b, k_b, mask.soft_cap)
        weights = (scores + bias).softmax(dim=-1)
        grad_scores = product(g_b, v_b.mT)
        along = (weights * grad_scores).sum(dim=-1, keepdim=True)
        grad_scores.sub_(along).mul_(weights)
        if grad_slopes is not None:
            grad_slopes.add_(grad_scores.sum(dim=(0, 2)) @ slot[slots])
        if mask.soft_cap is not None:
            grad_scores.mul_(1 - (scores / mask.soft_cap).square_())
        grad_q[rows, :, times] = product(grad_scores, k_b)
        n = k.shape[2]
        grad_k[rows, :, slots].add_(grouped(grad_scores, n).mT @ grouped(q_b, n))
        grad_v[rows, :, slots].add_(grouped(weights, n).mT @ grouped(g_b, n))
    scale = q.shape[-1] ** -0.5
    found = (g.transpose(1, 2) for g in (grad_q * scale, grad_k * scale, grad_v))
    return *found, AttentionMask(slopes=grad_slopes)


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """Convert to (batch, head, length, d_head), in float32 or better."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return [t.transpose(1, 2).to(dtype).contiguous() for t in tensors]


def _scores(q: Tensor, k: Tensor, soft_cap: float | None) -> Tensor:
    """Scores of the slots for each query of a block, before the bias."""
    return capped_(product(q * q.shape[-1] ** -0.5, k.mT), soft_cap)


def capped_(scores: Tensor, soft_cap: float | None) -> Tensor:
    """Bound new scores by c tanh(x / c) in place, if there is a soft cap c."""
    return scores if soft_cap is None else scores.div_(soft_cap).tanh_().mul_(soft_cap)


def grouped(x: Tensor, n_groups: int) -> Tensor:
    """Stack the rows of heads that share keys: (batch, group, head of the group * query, ...)."""
    return x.unflatten(1, (n_groups, x.shape[1] // n_groups)).flatten(2, 3)


def product(x: Tensor, shared: Tensor) -> Tensor:
    """Multiply each head by the matrix of its group, which is not copied."""
    n_groups, n_heads, length = shared.shape[1], x.shape[1], x.shape[2]
    rows = grouped(x, n_groups) @ shared
    return rows.unflatten(2, (n_heads // n_groups, length)).flatten(1, 2)


def _blocks(
    q: Tensor, k: Tensor, mask: AttentionMask
) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Blocks of rows and queries, each with the slots that its queries can see and the bias."""
    (batch, length, n_heads), slots, start = q.shape[:3], k.shape[1], mask.start
    budget = SCORES_PER_BLOCK.get(q.device.type, MANY_SCORES) // (n_heads * max(1, slots))
    n_times = max(1, min(length, max(16, budget)))
    n_rows = max(1, min(batch, budget // n_times))
    own = start is not None or mask.first is not None
    before = 0 if start is None else slots
    if start is not None and values_at_hand(start) and len(start):
        before = max(0, int(start.max()))
    for begin in range(0, length, n_times):
        times = slice(begin, min(begin + n_times, length))
        seen = slice(0, min(slots, before + times.stop))
        for row in range(0, batch, n_rows):
            rows = slice(row, row + n_rows)
            if own or row == 0:  # without start and first, all rows have the same bias
                parts = (None if t is None else t[rows] for t in (start, mask.first))
                start_of_rows, first = parts
                bias = _bias(q, times, seen, mask._replace(start=start_of_rows, first=first))
            yield rows, times, seen, bias


def _bias(q: Tensor, times: slice, slots: slice, mask: AttentionMask) -> Tensor:
    """Bias and mask to add to the scores: (row, or 1 if all are alike; head or 1; query; slot)."""
    positions = torch.arange(times.start, times.stop, device=q.device)[None]
    if mask.start is not None:
        positions = mask.start[:, None] + positions
    distance = positions[:, None, :, None] - torch.arange(slots.stop, device=q.device)
    hidden = distance < 0
    if mask.windows is not None:
        hidden = hidden | (distance >= mask.windows[:, None, None])
    if mask.first is not None:
        slot = torch.arange(slots.stop, device=q.device)
        hidden = hidden | (slot < mask.first[:, None, times, None])
    dtype = torch.promote_types(q.dtype, torch.float32)
    if mask.slopes is None:
        bias = torch.zeros(hidden.shape, dtype=dtype, device=q.device)
    else:
        bias = -mask.slopes.to(dtype)[:, None, None] * distance
    return bias.masked_fill(hidden, float("-inf"))


_masked = KernelOp("attention", _forward, _backward, lambda q, *_: torch.empty_like(q))
