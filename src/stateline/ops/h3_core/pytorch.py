"""The core of H3 composed of other ops, each on the backend that is best for it."""

from torch import Tensor

from stateline.ops.convolution import skipped, slide
from stateline.ops.diagonal_ssm import diagonal_ssm, diagonal_ssm_chunk, diagonal_ssm_step
from stateline.ops.short_conv import short_conv, short_conv_step
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
    """Filter, gate, recurrence, gate."""
    kv = _write(short_conv(k, taps), v, len(b))
    return _read(q, diagonal_ssm(kv, log_a, b, c) + skipped(kv, skip), len(b))


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
    """The same from given states."""
    kv = _write(short_conv(k, taps, past), v, len(b))
    y, state = diagonal_ssm_chunk(kv, log_a, b, c, state)
    return _read(q, y + skipped(kv, skip), len(b)), slide(past, k), state


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
    """The same for one token."""
    shifted, past = short_conv_step(k, weights[None], past)
    kv = _write(shifted.to(k.dtype), v, len(b))
    y, state = diagonal_ssm_step(kv, log_a, b, c, state)
    return _read(q, y + skipped(kv, skip), len(b)), past, state


def h3_core_stepper(weights: Tensor, log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Stepper:
    """Steps whose new states are copied over the old ones."""
    return copying(h3_core_step, (weights, log_a, b, c, skip), n_states=2)


def _write(k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Outer product of key and value in each head: (batch, key entry, value entry, ..., head)."""
    return _split(k, heads)[:, :, None] * _split(v, heads)[:, None]


def _read(q: Tensor, kv: Tensor, heads: int) -> Tensor:
    """Contract the key entries with the query: (batch, ..., readout * channel)."""
    q = _split(q, heads).tile(kv.shape[-1] // heads)
    o = (q[:, :, None] * kv).sum(dim=1)  # (batch, d_head, ..., readout * head)
    # Differs from the official PyTorch path, which orders the channels of wider heads as (entry,
    # head): algorithm 1 and the fused kernel order them as (head, entry), like the queries.
    return o.movedim(1, -1).flatten(-2)


def _split(x: Tensor, heads: int) -> Tensor:
    """From channel = head * d_head + entry to (batch, entry, ..., head)."""
    return x.unflatten(-1, (heads, -1)).movedim(-1, 1)
