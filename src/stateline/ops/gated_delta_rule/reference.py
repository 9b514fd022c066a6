"""The definition of the gated delta rule: its recurrence."""

import torch
from torch import Tensor

from stateline.ops.starts import reset
from stateline.ops.stepping import copying


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence to one token after the other."""
    log_decay = reset(log_decay, starts, v)
    outputs = [v[:, :0]]
    for t in range(v.shape[1]):
        y, state = gated_delta_rule_step(
            q[:, t], k[:, t], v[:, t], log_decay[:, t], beta[:, t], state
        )
        outputs.append(y[:, None])
    return torch.cat(outputs, dim=1), state


def gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence once."""
    dtype = v.dtype
    q, k, v, log_decay, beta = (t.to(state.dtype) for t in (q, k, v, log_decay, beta))
    state = log_decay.exp()[..., None, None] * state
    found = (k[..., None] * state).sum(dim=-2)  # value that the state holds at the key
    state = state + k[..., None] * (beta[..., None] * (v - found))[..., None, :]
    return (q[..., None] * state).sum(dim=-2).to(dtype), state


gated_delta_rule_step_ = copying(gated_delta_rule_step)
