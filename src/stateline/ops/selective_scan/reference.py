"""The definition of the selective scan: its recurrence."""

import torch
from torch import Tensor

from stateline.ops.stepping import copying


def selective_scan(
    u: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence to one input after the other."""
    outputs = [u[:, :0]]
    for t in range(u.shape[1]):
        if starts is not None:
            state = state.masked_fill(starts[:, t, None, None], 0.0)
        y, state = selective_scan_step(u[:, t], dt[:, t], a, b[:, t], c[:, t], state)
        outputs.append(y[:, None])
    return torch.cat(outputs, dim=1), state


def selective_scan_step(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence once."""
    signal, step = u.to(state.dtype)[..., None], dt.to(state.dtype)[..., None]
    each = u.shape[1] // b.shape[1]
    write, read = (t.to(state.dtype).repeat_interleave(each, dim=1) for t in (b, c))
    state = (step * a).exp() * state + step * signal * write
    return (state * read).sum(dim=-1).to(u.dtype), state


selective_scan_step_ = copying(selective_scan_step)
