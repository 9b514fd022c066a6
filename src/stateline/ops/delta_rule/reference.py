"""The definition of the delta rule with a decay per entry: its recurrence."""

from torch import Tensor

from stateline.ops.delta_rule import DeltaSignals
from stateline.ops.stepping import over_time


def delta_rule_step(x: DeltaSignals, state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the recurrence once."""
    q, k, v, log_decay, a, b = (signal.to(state.dtype) for signal in x)
    found = (a[..., None] * state).sum(dim=-2)  # value that the state holds at a
    state = log_decay.exp()[..., None] * state + b[..., None] * found[..., None, :]
    state = state + k[..., None] * v[..., None, :]
    return (q[..., None] * state).sum(dim=-2).to(x.v.dtype), state


delta_rule = over_time(delta_rule_step, "v")
