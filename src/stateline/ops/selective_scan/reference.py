"""The definition of the selective scan: its recurrence."""

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.ops.stepping import in_float32


def selective_scan(
    u: Float[Tensor, "batch length channel"],
    dt: Float[Tensor, "batch length channel"],
    a: Float[Tensor, "channel d_state"],
    b: Float[Tensor, "batch length group d_state"],
    c: Float[Tensor, "batch length group d_state"],
    state: Float[Tensor, "batch channel d_state"],
) -> tuple[Float[Tensor, "batch length channel"], Float[Tensor, "batch channel d_state"]]:
    """Apply the recurrence to one input after the other."""
    outputs = [u[:, :0]]
    for t in range(u.shape[1]):
        y, state = selective_scan_step(u[:, t], dt[:, t], a, b[:, t], c[:, t], state)
        outputs.append(y[:, None])
    return torch.cat(outputs, dim=1), state


def selective_scan_step(
    u: Float[Tensor, "batch channel"],
    dt: Float[Tensor, "batch channel"],
    a: Float[Tensor, "channel d_state"],
    b: Float[Tensor, "batch group d_state"],
    c: Float[Tensor, "batch group d_state"],
    state: Float[Tensor, "batch channel d_state"],
) -> tuple[Float[Tensor, "batch channel"], Float[Tensor, "batch channel d_state"]]:
    """Apply the recurrence once."""
    signal, step = u.to(state.dtype)[..., None], dt.to(state.dtype)[..., None]
    each = u.shape[1] // b.shape[1]
    write, read = (t.to(state.dtype).repeat_interleave(each, dim=1) for t in (b, c))
    state = (step * a).exp() * state + step * signal * write
    return (state * read).sum(dim=-1).to(u.dtype), state


def selective_scan_step_(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> Tensor:
    """A step whose new state is copied over the old one."""
    y, after = selective_scan_step(u, dt, a, b, c, in_float32(state))
    state.copy_(after)
    return y
