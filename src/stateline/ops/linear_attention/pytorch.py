r"""Linear attention in chunks: attention inside a chunk, the state between chunks, on any device.

With :math:`G_t` the sum of the logarithmic decays from the chunk's beginning, and S its state,

.. math::
    y_t = e^{G_t} S^\top q_t + \sum_{s \le t} e^{G_t - G_s} (q_t \cdot k_s)\, v_s

All exponents are sums of decays after s, so none is positive.
"""

import torch
from torch import Tensor

CHUNK = 64
"""Tokens in a chunk."""


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Go from chunk to chunk."""
    groups, dtype = q.shape[2], v.dtype
    if v.shape[1] == 0:
        return v.clone(), state.clone()
    if log_decay is None:
        log_decay = torch.zeros((), dtype=state.dtype, device=v.device).expand(v.shape[:3])
    h = state.unflatten(1, (groups, -1))
    q, k = (t.to(state.dtype).transpose(1, 2) for t in (q, k))  # (batch, group, length, d_key)
    v, log_decay = (
        t.to(state.dtype).unflatten(2, (groups, -1)).movedim(1, 3) for t in (v, log_decay)
    )  # (batch, group, head of the group, length, ...)
    outputs = []
    for q_c, k_c, v_c, g_c in zip(
        q.split(CHUNK, dim=2),
        k.split(CHUNK, dim=2),
        v.split(CHUNK, dim=3),
        log_decay.split(CHUNK, dim=3),
        strict=True,
    ):
        between, since, until = decays(g_c)
        scores = (q_c @ k_c.mT).unsqueeze(2) * between
        outputs.append(scores @ v_c + since * (q_c.unsqueeze(2) @ h))
        h = since[..., -1:, :] * h + k_c.mT.unsqueeze(2) @ (until * v_c)
    y = torch.cat(outputs, dim=3).movedim(3, 1).flatten(2, 3)
    return y.to(dtype), h.flatten(1, 2)


def decays(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decays inside a chunk.

    Args:
        log_decay: Of each token (..., length).

    Returns:
        From each token to each (..., length, length), zero where it lies later; from the state
        before the chunk to each token, and from each token to the chunk's end (..., length, 1).
    """
    size = log_decay.shape[-1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    # each sum is taken by itself: as a difference of two from the chunk's beginning, it would lose
    # its digits after one strong decay
    sums = log_decay[..., None].masked_fill(~earlier.tril(-1), 0.0).cumsum(dim=-2)
    between = sums.masked_fill(~earlier, float("-inf")).exp()
    since = log_decay.cumsum(dim=-1)[..., None].exp()
    return between, since, between[..., -1, :, None]
