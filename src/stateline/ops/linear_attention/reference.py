"""The definition of linear attention: its recurrence."""

import torch
from jaxtyping import Float
from torch import Tensor


def linear_attention(
    q: Float[Tensor, "batch length group d_key"],
    k: Float[Tensor, "batch length group d_key"],
    v: Float[Tensor, "batch length head d_value"],
    log_decay: Float[Tensor, "batch length head"] | None,
    state: Float[Tensor, "batch head d_key d_value"],
) -> tuple[Float[Tensor, "batch length head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    """Apply the recurrence to one token after the other."""
    outputs = [v[:, :0]]
    for t in range(v.shape[1]):
        decay = None if log_decay is None else log_decay[:, t]
        y, state = linear_attention_step(q[:, t], k[:, t], v[:, t], decay, state)
        outputs.append(y[:, None])
    return torch.cat(outputs, dim=1), state


def linear_attention_step(
    q: Float[Tensor, "batch group d_key"],
    k: Float[Tensor, "batch group d_key"],
    v: Float[Tensor, "batch head d_value"],
    log_decay: Float[Tensor, "batch head"] | None,
    state: Float[Tensor, "batch head d_key d_value"],
) -> tuple[Float[Tensor, "batch head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    """Apply the recurrence once."""
    each = v.shape[1] // q.shape[1]
    query, key = (t.to(state.dtype).repeat_interleave(each, dim=1) for t in (q, k))
    if log_decay is not None:
        state = log_decay.to(state.dtype).exp()[..., None, None] * state
    state = state + key[..., None] * v.to(state.dtype)[..., None, :]
    return (query[..., None] * state).sum(dim=-2).to(v.dtype), state
