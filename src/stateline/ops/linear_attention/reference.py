"""The definition of linear attention: its recurrence."""

from torch import Tensor

from stateline.ops.linear_attention import LinearSignals
from stateline.ops.stepping import over_time


def linear_attention_step(x: LinearSignals, state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the recurrence once."""
    q, k, v, log_decay = x.with_own_keys()
    q, k, v = (signal.to(state.dtype) for signal in (q, k, v))
    if log_decay is not None:
        state = rows_of(log_decay.to(state.dtype).exp(), v) * state
    state = state + k[..., None] * v[..., None, :]
    return (q[..., None] * state).sum(dim=-2).to(x.v.dtype), state


def rows_of(decay: Tensor, v: Tensor) -> Tensor:
    """Decays of the rows of states: one per head, or one for each entry of a key."""
    return decay[..., None] if decay.ndim == v.ndim else decay[..., None, None]


linear_attention = over_time(linear_attention_step, "v")
