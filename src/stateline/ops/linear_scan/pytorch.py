"""Linear scan by doubling: after n passes, each state has seen the latest 2^n tokens."""

import torch
from torch import Tensor

from stateline.ops.kernel_op import KernelOp, empty_like
from stateline.ops.starts import at_starts


def linear_scan(
    f: Tensor, b: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the operator in the dtype of the state."""
    f = at_starts(f, starts, 0.0)
    h, after = _scan(f.to(state.dtype), b.to(state.dtype), state)
    return h.to(b.dtype), after


def linear_scan_step(f: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence once."""
    after = f.to(state.dtype) * state + b
    return after.to(b.dtype, copy=True), after


def _states(f: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """All states. The maps h -> f h + b of neighbouring tokens are joined, pass by pass."""
    h, reach = torch.cat([b[:, :1] + f[:, :1] * state[:, None], b[:, 1:]], dim=1), 1
    while reach < b.shape[1]:
        h = torch.cat([h[:, :reach], h[:, reach:] + f[:, reach:] * h[:, :-reach]], dim=1)
        f = torch.cat([f[:, :reach], f[:, reach:] * f[:, :-reach]], dim=1)
        reach *= 2
    return h


def _forward(f: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    h = _states(f, b, state)
    return h, (h[:, -1] if h.shape[1] else state).clone()


def _backward(
    grad: Tensor, grad_after: Tensor, f: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scan the gradients of the states backward: g_t = f_{t+1} g_{t+1} + dh_t."""
    if not b.shape[1]:
        return f, b, grad_after
    before = torch.cat([state[:, None], _states(f, b, state)[:, :-1]], dim=1)
    later = torch.cat([f[:, 1:], torch.ones_like(f[:, :1])], dim=1)
    g = _states(later.flip(1), grad.flip(1), grad_after).flip(1)
    return g * before, g, f[:, 0] * g[:, 0]


_scan = KernelOp("linear_scan", _forward, _backward, lambda _, b, state: empty_like(b, state))
