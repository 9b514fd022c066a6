"""The definition of local attention: all scores at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.local_attention import LocalWindow


def local_attention(q: Tensor, k: Tensor, v: Tensor, window: LocalWindow, dropout: float) -> Tensor:
    """Softmax over the allowed scores, in float32 or better; zero where none is allowed."""
    size, first, bias, position_keys, block_len, phase, cap = window
    dtype = torch.promote_types(q.dtype, torch.float32)
    length, slots = q.shape[1], k.shape[1]
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    slot = torch.arange(slots, device=q.device)
    distance = slots - length + torch.arange(length, device=q.device)[:, None] - slot
    allowed = (distance >= 0) & (distance < size)
    by_distance = distance.clamp(0, size - 1)

    scores = torch.einsum("bthd,bshd->bhts", q.to(dtype), k.to(dtype))
    if position_keys is not None:
        keys = position_keys.to(dtype)[by_distance]  # (length, slot, d_head)
        scores = scores + torch.einsum("bthd,tsd->bhts", q.to(dtype), keys)
    scores = scores * q.shape[-1] ** -0.5
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    if bias is not None:
        scores = scores + bias.to(dtype)[:, by_distance]
    if first is not None:
        allowed = allowed & (slot >= first[:, None, None, None])
    if block_len is not None and phase is not None:
        place = (phase[:, None] + torch.arange(length, device=q.device)) % block_len
        allowed = allowed & (distance <= (size - block_len + place)[:, None, :, None])
    scores = scores.masked_fill(~allowed, float("-inf"))
    nothing = (scores == float("-inf")).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0.0).softmax(dim=-1).masked_fill(nothing, 0.0)
    weights = F.dropout(weights, dropout)
    return torch.einsum("bhts,bshd->bthd", weights, v.to(dtype)).to(q.dtype)
