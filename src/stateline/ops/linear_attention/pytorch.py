r"""Linear attention in chunks: attention inside a chunk, the state between chunks, on any device.

With :math:`G_t` the sum of the logarithmic decays since the chunk's start, and S the state there,

.. math::
    y_t = e^{G_t} S^\top q_t + \sum_{s \le t} e^{G_t - G_s} (q_t \cdot k_s)\, v_s

Every exponent is a sum of logarithmic decays, so none is positive. If entries of keys decay by
themselves, the scores are :math:`\sum_i e^{G_{t,i} - G_{s,i}} q_{t,i} k_{s,i}`, in short
chunks, for all tokens and entries at once: a product of matrices with the factors :math:`e^{G_t}`
and :math:`e^{-G_s}` would overflow.
"""

import torch
from torch import Tensor

from stateline.ops.linear_attention import CHUNK, SHORT, LinearSignals
from stateline.ops.linear_attention.reference import linear_attention_step as linear_attention_step
from stateline.ops.stepping import over_chunks


def linear_attention(
    x: LinearSignals, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend inside each chunk, and carry the state to the next."""
    if x.decays_by_entry:
        return _by_entry(x.with_own_keys(), state, starts)
    if x.log_decay is None:
        x = x._replace(log_decay=state.new_zeros(()).expand(x.v.shape[:3]))
    return _by_head(x, state, starts)


def _chunk_by_head(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """A chunk where the entries of a key decay alike; a group of heads shares queries and keys."""
    v, log_decay, state = (t.unflatten(1, (q.shape[1], -1)) for t in (v, log_decay, state))
    q, k = q.unsqueeze(2), k.unsqueeze(2)  # (batch, group, 1, length, d_key)
    between, since, until = decays(log_decay)
    y = (q @ k.mT * between) @ v + since * (q @ state)
    after = since[..., -1:, :] * state + k.mT @ (until * v)
    return y.flatten(1, 2), after.flatten(1, 2)


_by_head = over_chunks(_chunk_by_head, CHUNK)


def _chunk_by_entry(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """A chunk where each entry of a key decays by itself."""
    between, since, until = decays(log_decay.mT)  # (batch, head, entry, ...)
    since, until = since.squeeze(-1).mT, until.squeeze(-1).mT
    y = products(q, between, k) @ v + (since * q) @ state
    return y, since[..., -1, :, None] * state + (until * k).mT @ v


_by_entry = over_chunks(_chunk_by_entry, SHORT)


def products(x: Tensor, decay: Tensor, w: Tensor) -> Tensor:
    """Products of x at token t with w at token s that has decayed in between (..., t, s)."""
    return torch.einsum("bhti,bhits,bhsi->bhts", x, decay, w)


def decays(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decays inside a chunk.

    Args:
        log_decay: Logarithmic decay at each token (..., length).

    Returns:
        Decay from token s to token t at [t, s] (..., length, length), zero for s > t; decay from
        the chunk's start to each token, and from each token to the chunk's end (..., length, 1).
    """
    size = log_decay.shape[-1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    # every sum is computed separately: a difference of two cumulative sums loses all digits after
    # one strong decay
    sums = log_decay[..., None].masked_fill(~earlier.tril(-1), 0.0).cumsum(dim=-2)
    between = sums.masked_fill(~earlier, float("-inf")).exp()
    since = log_decay.cumsum(dim=-1)[..., None].exp()
    return between, since, between[..., -1, :, None]
