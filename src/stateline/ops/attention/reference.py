"""The definition of causal attention: all scores at once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.attention import AttentionCache, AttentionMask
from stateline.ops.pointwise import rotary
from stateline.ops.positions import rotation


def attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float) -> Tensor:
    """Softmax over the allowed scores, in float32 or better."""
    start, slopes, windows, first, cap = mask
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    queries = torch.arange(q.shape[1], device=q.device)
    if start is not None:
        queries = start[:, None] + queries
    distance = queries[..., :, None] - torch.arange(k.shape[1], device=q.device)
    distance = distance.unsqueeze(-3)  # (batch or nothing, 1, length, slot)
    scores = torch.einsum("bthd,bshd->bhts", q.to(dtype), k.to(dtype)) * q.shape[-1] ** -0.5
    if cap is not None:
        scores = cap * (scores / cap).tanh()
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


def step_by(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """From a function like ``attention`` the one that puts a token into the cache first."""

    def step(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: AttentionCache,
        mask: AttentionMask,
        frequency: Tensor | None,
        dropout: float,
    ) -> Tensor:
        slot = cache.length[:, None]
        q, k, v = (x[:, None] for x in (q, k, v))
        if frequency is not None:
            angles = rotation(slot, frequency)
            q, k = rotary(q, *angles), rotary(k, *angles)
        index = slot[..., None, None].expand_as(k)
        for held, new in zip(cache[:2], (k, v), strict=True):
            held.scatter_(1, index, new.to(held.dtype))
        keys, values = cache.k.to(q.dtype), cache.v.to(q.dtype)
        return attend(q, keys, values, mask._replace(start=cache.length), dropout)[:, 0]

    return step


attention_step_ = step_by(attention)
