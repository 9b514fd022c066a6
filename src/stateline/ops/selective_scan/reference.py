"""The definition of the selective scan: its recurrence."""

from torch import Tensor

from stateline.ops.selective_scan import ScanSignals
from stateline.ops.stepping import over_time


def selective_scan(
    x: ScanSignals, a: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence to one input after the other."""
    return over_time(lambda x, state: selective_scan_step(x, a, state), "u")(x, state, starts)


def selective_scan_step(x: ScanSignals, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the recurrence once."""
    u, dt, b, c = (signal.to(state.dtype) for signal in x)
    each = u.shape[1] // b.shape[1]
    b, c = (vector.repeat_interleave(each, dim=1) for vector in (b, c))
    state = (dt[..., None] * a).exp() * state + (dt * u)[..., None] * b
    return (state * c).sum(dim=-1).to(x.u.dtype), state
