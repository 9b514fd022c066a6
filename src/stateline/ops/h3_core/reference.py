"""The definition of the core of H3, from those of its parts."""

import torch
from torch import Tensor

from stateline.ops.diagonal_ssm.reference import diagonal_ssm_chunk
from stateline.ops.short_conv.reference import short_conv
from stateline.ops.stepping import Stepper, copying


def h3_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    taps: Tensor,
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
) -> Tensor:
    """Start from zero states."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, d_head = len(q), q.shape[-1] // len(b)
    past = torch.zeros(batch, taps.shape[1] - 1, q.shape[-1], dtype=dtype, device=q.device)
    state = torch.zeros(batch, d_head, d_head, *b.shape, dtype=dtype, device=q.device)
    return h3_core_chunk(q, k, v, taps, log_a, b, c, skip, past, state)[0]


def h3_core_chunk(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    taps: Tensor,
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    past: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Filter the keys, run one diagonal SSM for each pair of entries, contract with the query."""
    before, dtype = past.shape[1], q.dtype
    keys = torch.cat([past, k.to(past.dtype)], dim=1)
    q, k, v = (
        t.to(state.dtype).unflatten(-1, (len(b), -1))
        for t in (q, short_conv(keys, taps)[:, before:], v)
    )  # each (batch, length, head, entry)
    kv = torch.einsum("bthi,bthj->bijth", k, v)
    y, state = diagonal_ssm_chunk(kv, log_a, b, c, state)
    y = y.unflatten(-1, (-1, len(b))) + skip.unflatten(0, (-1, len(b))) * kv[..., None, :]
    read = torch.einsum("bthi,bijtrh->btrhj", q, y)
    return read.flatten(-3).to(dtype), keys[:, keys.shape[1] - before :], state


def h3_core_step(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    past: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk of one token."""
    q, k, v = (t[:, None] for t in (q, k, v))
    taps = weights.mT.flip(-1)
    y, past, state = h3_core_chunk(q, k, v, taps, log_a, b, c, skip, past, state)
    return y[:, 0], past, state


def h3_core_stepper(weights: Tensor, log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Stepper:
    """Steps whose new states are copied over the old ones."""
    return copying(h3_core_step, (weights, log_a, b, c, skip), n_states=2)
