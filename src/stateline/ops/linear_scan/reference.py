"""The definition of a linear scan, token by token."""

import torch
from torch import Tensor

from stateline.ops.starts import at_starts


def linear_scan(
    f: Tensor, b: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence in the dtype of the state."""
    f, states = at_starts(f, starts, 0.0).to(state.dtype), [b[:, :0]]
    for t in range(b.shape[1]):
        state = f[:, t] * state + b[:, t]
        states.append(state[:, None].to(b.dtype))
    return torch.cat(states, dim=1), state.clone()


def linear_scan_step(f: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence once."""
    y, after = linear_scan(f[:, None], b[:, None], state)
    return y[:, 0], after
