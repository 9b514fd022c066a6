"""The definition of the delta rule with a decay per entry: its recurrence."""

import torch
from torch import Tensor

from stateline.ops.starts import reset
from stateline.ops.stepping import copying


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence to one token after the other."""
    log_decay = reset(log_decay, starts, v)
    outputs = [v[:, :0]]
    for t in range(v.shape[1]):
        y, state = delta_rule_step(
            q[:, t], k[:, t], v[:, t], log_decay[:, t], a[:, t], b[:, t], state
        )
        outputs.append(y[:, None])
    return torch.cat(outputs, dim=1), state


def delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence once."""
    dtype = v.dtype
    q, k, v, log_decay, a, b = (x.to(state.dtype) for x in (q, k, v, log_decay, a, b))
    found = (a[..., None] * state).sum(dim=-2)  # value that the state holds at a
    state = log_decay.exp()[..., None] * state + b[..., None] * found[..., None, :]
    state = state + k[..., None] * v[..., None, :]
    return (q[..., None] * state).sum(dim=-2).to(dtype), state


delta_rule_step_ = copying(delta_rule_step)
