"""The definition of the core of H3, from the definitions of its parts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.convolution import slide
from stateline.ops.diagonal_ssm.reference import diagonal_ssm
from stateline.ops.h3_core import H3CoreState, H3Weights
from stateline.ops.short_conv.reference import short_conv
from stateline.ops.stepping import Stepper, copying, one_token


def h3_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: H3Weights,
    state: H3CoreState | None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Filter the keys, run one diagonal SSM for each pair of entries, contract with the query."""
    taps, diagonal, skip = weights
    (batch, _, width), heads, dtype = q.shape, len(diagonal.b), q.dtype
    past, h = _zeros(batch, width, weights, q) if state is None else state
    keys = torch.cat([past, k.to(past.dtype)], dim=1)
    begins = None if starts is None else F.pad(starts, (past.shape[1], 0))
    after = slide(past, k, starts)
    q, k, v = (
        t.to(h.dtype).unflatten(-1, (heads, -1))
        for t in (q, short_conv(keys, taps, begins)[:, past.shape[1] :], v)
    )  # each (batch, length, head, entry)
    kv = torch.einsum("bthi,bthj->bijth", k, v)
    each = None if starts is None else starts[:, None, None].expand(kv.shape[:-1])
    y, h = diagonal_ssm(kv, diagonal, h, each)
    y = y.unflatten(-1, (-1, heads)) + skip.unflatten(0, (-1, heads)) * kv[..., None, :]
    read = torch.einsum("bthi,bijtrh->btrhj", q, y).flatten(-3).to(dtype)
    return read, None if state is None else H3CoreState(after, h)


h3_core_step = one_token(h3_core)


def h3_core_stepper(weights: H3Weights) -> Stepper:
    """Steps whose new states are copied over the old ones."""
    return copying(lambda q, k, v, state: h3_core_step(q, k, v, weights, state))


def _zeros(batch: int, width: int, weights: H3Weights, like: Tensor) -> H3CoreState:
    dtype, b = torch.promote_types(like.dtype, torch.float32), weights.diagonal.b
    d_head = width // len(b)
    past = like.new_zeros(batch, weights.taps.shape[1] - 1, width, dtype=dtype)
    return H3CoreState(past, like.new_zeros(batch, d_head, d_head, *b.shape, dtype=dtype))
