"""The definition of the gated delta rule: its recurrence."""

from torch import Tensor

from stateline.ops.gated_delta_rule import GatedDeltaSignals
from stateline.ops.stepping import over_time


def gated_delta_rule_step(x: GatedDeltaSignals, state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the recurrence once."""
    q, k, v, log_decay, beta = (signal.to(state.dtype) for signal in x)
    state = log_decay.exp()[..., None, None] * state
    found = (k[..., None] * state).sum(dim=-2)  # value that the state holds at the key
    state = state + k[..., None] * (beta[..., None] * (v - found))[..., None, :]
    return (q[..., None] * state).sum(dim=-2).to(x.v.dtype), state


gated_delta_rule = over_time(gated_delta_rule_step, "v")
