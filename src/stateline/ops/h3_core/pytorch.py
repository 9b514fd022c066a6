"""The core of H3 composed of other ops, each on the backend that is best for it."""

from typing import Any

from torch import Tensor

from stateline.ops.convolution import skipped, slide
from stateline.ops.diagonal_ssm import diagonal_ssm, diagonal_ssm_step, diagonal_ssm_stepper
from stateline.ops.h3_core import H3CoreState, H3Weights
from stateline.ops.short_conv import short_conv, short_conv_step, short_conv_stepper
from stateline.ops.stepping import Stepper


def h3_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: H3Weights,
    state: H3CoreState | None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Filter, gate, recurrence, gate."""
    (taps, diagonal, skip), heads = weights, len(weights.diagonal.b)
    past, h = (None, None) if state is None else state
    kv = _write(short_conv(k, taps, past, starts=starts), v, heads)
    each = None if starts is None else starts[:, None, None].expand(kv.shape[:-1])
    y, h = diagonal_ssm(kv, diagonal, h, starts=each)
    after = None if past is None else H3CoreState(slide(past, k, starts), h)
    return _read(q, y + skipped(kv, skip), heads), after


def h3_core_step(
    q: Tensor, k: Tensor, v: Tensor, weights: H3Weights, state: H3CoreState
) -> tuple[Tensor, H3CoreState]:
    """The same for one token."""
    (taps, diagonal, skip), heads = weights, len(weights.diagonal.b)
    shifted, past = short_conv_step(k, taps.flip(-1).mT[None], state.past)
    kv = _write(shifted.to(k.dtype), v, heads)
    y, h = diagonal_ssm_step(kv, diagonal, state.h)
    return _read(q, y + skipped(kv, skip), heads), H3CoreState(past, h)


def h3_core_stepper(weights: H3Weights) -> Stepper:
    """Steps of the filter and of the diagonal SSMs, which change their states."""
    (taps, diagonal, skip), heads = weights, len(weights.diagonal.b)
    shift = short_conv_stepper(taps.flip(-1).mT)
    advance = diagonal_ssm_stepper(diagonal, skip)

    def step(q: Tensor, k: Tensor, v: Tensor, state: H3CoreState) -> Tensor:
        kv = _write(shift(k, state.past).to(k.dtype), v, heads)
        return _read(q, advance(kv, state.h), heads)

    return step


def _write(k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Outer product of key and value in each head: (batch, key entry, value entry, ..., head)."""
    if k.shape[-1] == heads:
        return (k * v)[:, None, None]
    return _split(k, heads)[:, :, None] * _split(v, heads)[:, None]


def _read(q: Tensor, kv: Tensor, heads: int) -> Tensor:
    """Contract the key entries with the query: (batch, ..., readout * channel)."""
    if kv.shape[1] == 1 and q.shape[-1] == kv.shape[-1]:
        return q * kv[:, 0, 0]
    q = _split(q, heads).tile(kv.shape[-1] // heads)
    o = (q[:, :, None] * kv).sum(dim=1)  # (batch, d_head, ..., readout * head)
    # Differs from the official PyTorch path, which orders the channels of wider heads as (entry,
    # head): algorithm 1 and the fused kernel order them as (head, entry), like the queries.
    return o.movedim(1, -1).flatten(-2)


def _split(x: Tensor, heads: int) -> Tensor:
    """From channel = head * d_head + entry to (batch, entry, ..., head)."""
    return x.unflatten(-1, (heads, -1)).movedim(-1, 1)
