"""The definition of causal attention: all scores at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.attention import AttentionCache, AttentionMask
from stateline.ops.attention.cache import append


def attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float) -> Tensor:
    """Softmax over the allowed scores, in float32 or better."""
    start, slopes, windows, first = mask
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    queries = torch.arange(q.shape[1], device=q.device)
    if start is not None:
        queries = start[:, None] + queries
    distance = queries[..., :, None] - torch.arange(k.shape[1], device=q.device)
    distance = distance.unsqueeze(-3)  # (batch or nothing, 1, length, slot)
    scores = torch.einsum("bthd,bshd->bhts", q.to(dtype), k.to(dtype)) * q.shape[-1] ** -0.5
    if slopes is not None:
        scores = scores - slopes.to(dtype)[:, None, None] * distance
    allowed = distance >= 0
    if windows is not None:
        allowed = allowed & (distance < windows[:, None, None])
    if first is not None:
        allowed = allowed & (torch.arange(k.shape[1], device=q.device) >= first[:, None, :, None])
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
    weights = F.dropout(weights, dropout)
    return torch.einsum("bhts,bshd->bthd", weights, v.to(dtype)).to(q.dtype)


def attention_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: AttentionCache,
    mask: AttentionMask,
    frequency: Tensor | None,
    dropout: float,
) -> Tensor:
    """The definition on the cache and one more token."""
    q, k, v = append(q, k, v, cache, frequency)
    return attention(q, k, v, mask._replace(start=cache.length), dropout)[:, 0]
