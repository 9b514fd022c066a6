"""Causal attention by PyTorch's fused kernels, in blocks of queries where there is a bias."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stateline.ops.library import define_op

QUERY_BLOCK = 256
"""Queries whose biases are in memory at a time: memory is linear in the length, not quadratic."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    slopes: Tensor | None,
    windows: Tensor | None,
) -> Tensor:
    """Leave plain causal attention to PyTorch, which saves inputs and one number per query."""
    if start is None and slopes is None and windows is None:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, head, length, d_head)
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return _biased_attention(q, k, v, start, slopes, windows)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    slopes: Tensor | None,
    windows: Tensor | None,
) -> Tensor:
    y = torch.empty_like(q)
    for rows, slots in _blocks(q, k, start):
        bias = _bias(q, rows, slots, start, slopes, windows)
        heads_first = (q[:, rows], k[:, slots], v[:, slots])
        q_b, k_b, v_b = (t.transpose(1, 2) for t in heads_first)
        y[:, rows] = scaled_dot_product_attention(q_b, k_b, v_b, attn_mask=bias).transpose(1, 2)
    return y


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    slopes: Tensor | None,
    windows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Recompute the weights P of each block; dS = P (dP - sum(P dP)) for P = softmax(S)."""
    scale = q.shape[-1] ** -0.5
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, slots in _blocks(q, k, start):
        bias = _bias(q, rows, slots, start, slopes, windows)
        q_b, k_b, v_b, g_b = q[:, rows], k[:, slots], v[:, slots], grad[:, rows]
        weights = torch.einsum("bthd,bshd->bhts", q_b * scale, k_b).add_(bias).softmax(dim=-1)
        grad_v[:, slots] += torch.einsum("bhts,bthd->bshd", weights, g_b)
        grad_weights = torch.einsum("bthd,bshd->bhts", g_b, v_b)
        mean = (grad_weights * weights).sum(dim=-1, keepdim=True)
        grad_scores = weights * (grad_weights - mean) * scale
        grad_q[:, rows] = torch.einsum("bhts,bshd->bthd", grad_scores, k_b)
        grad_k[:, slots] += torch.einsum("bhts,bthd->bshd", grad_scores, q_b)
    return grad_q, grad_k, grad_v


def _blocks(q: Tensor, k: Tensor, start: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the slots that it can see."""
    length = q.shape[1]
    for first in range(0, length, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, length)
        yield slice(first, last), slice(0, last if start is None else k.shape[1])


def _bias(
    q: Tensor,
    rows: slice,
    slots: slice,
    start: Tensor | None,
    slopes: Tensor | None,
    windows: Tensor | None,
) -> Tensor:
    """What is added to the scores of a block: (batch or 1, head or 1, query, slot)."""
    queries = torch.arange(rows.start, rows.stop, device=q.device)[None]
    if start is not None:
        queries = start[:, None] + queries
    distance = queries[:, None, :, None] - torch.arange(slots.stop, device=q.device)
    hidden = distance < 0
    if windows is not None:
        hidden = hidden | (distance >= windows[:, None, None])
    if slopes is None:
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
    else:
        bias = -slopes.to(q.dtype)[:, None, None] * distance
    return bias.masked_fill(hidden, float("-inf"))


_biased_attention = define_op("attention", _forward, _backward)
