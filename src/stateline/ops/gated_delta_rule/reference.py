"""The definition of the gated delta rule: its recurrence."""

import torch
from jaxtyping import Float
from torch import Tensor


def gated_delta_rule(
    q: Float[Tensor, "batch length head d_key"],
    k: Float[Tensor, "batch length head d_key"],
    v: Float[Tensor, "batch length head d_value"],
    log_decay: Float[Tensor, "batch length head"],
    beta: Float[Tensor, "batch length head"],
    state: Float[Tensor, "batch head d_key d_value"],
) -> tuple[Float[Tensor, "batch length head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    """Apply the recurrence to one token after the other."""
    outputs = [v[:, :0]]
    for t in range(v.shape[1]):
        y, state = gated_delta_rule_step(
            q[:, t], k[:, t], v[:, t], log_decay[:, t], beta[:, t], state
        )
        outputs.append(y[:, None])
    return torch.cat(outputs, dim=1), state


def gated_delta_rule_step(
    q: Float[Tensor, "batch head d_key"],
    k: Float[Tensor, "batch head d_key"],
    v: Float[Tensor, "batch head d_value"],
    log_decay: Float[Tensor, "batch head"],
    beta: Float[Tensor, "batch head"],
    state: Float[Tensor, "batch head d_key d_value"],
) -> tuple[Float[Tensor, "batch head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    """Apply the recurrence once."""
    dtype = v.dtype
    q, k, v, log_decay, beta = (t.to(state.dtype) for t in (q, k, v, log_decay, beta))
    state = log_decay.exp()[..., None, None] * state
    found = (k[..., None] * state).sum(dim=-2)  # value that the state holds at the key
    state = state + k[..., None] * (beta[..., None] * (v - found))[..., None, :]
    return (q[..., None] * state).sum(dim=-2).to(dtype), state
