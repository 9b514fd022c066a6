"""The definition of linear attention: its recurrence."""

import torch
from torch import Tensor

from stateline.ops.starts import reset
from stateline.ops.stepping import copying


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence to one token after the other."""
    log_decay = reset(log_decay, starts, v)
    outputs = [v[:, :0]]
    for t in range(v.shape[1]):
        decay = None if log_decay is None else log_decay[:, t]
        y, state = linear_attention_step(q[:, t], k[:, t], v[:, t], decay, state)
        outputs.append(y[:, None])
    return torch.cat(outputs, dim=1), state


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence once."""
    each = v.shape[1] // q.shape[1]
    query, key = (t.to(state.dtype).repeat_interleave(each, dim=1) for t in (q, k))
    if log_decay is not None:
        state = rows_of(log_decay.to(state.dtype).exp(), v) * state
    state = state + key[..., None] * v.to(state.dtype)[..., None, :]
    return (query[..., None] * state).sum(dim=-2).to(v.dtype), state


def rows_of(decay: Tensor, v: Tensor) -> Tensor:
    """Decays of the rows of states: one per head, or one for each entry of a key."""
    return decay[..., None] if decay.ndim == v.ndim else decay[..., None, None]


linear_attention_step_ = copying(linear_attention_step)
