"""Selective scan in blocks of time, on any device.

Everything that does not depend on the state is computed for a whole block at once; one multiply-add
per token remains. A block fits into a processor's cache. Inside, time is the first axis and the
channels are the last.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stateline.ops.kernel_op import KernelOp, empty_like
from stateline.ops.selective_scan import ScanSignals
from stateline.ops.selective_scan.reference import selective_scan_step as selective_scan_step

BLOCK = 1 << 18
"""Number of state entries of all tokens in a block: 1 MiB in float32."""


def selective_scan(
    x: ScanSignals, a: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the operator in the dtype of the state."""
    y, after = _scan(ScanSignals(*(t.to(state.dtype) for t in x)), a.to(state.dtype), state, starts)
    return y.to(x.u.dtype), after


def _forward(
    x: ScanSignals, a: Tensor, state: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, a, h = _inner(x, a, state)
    outputs = [x.u[:0]]
    for part in _blocks(x.dt, a):
        _, states = _run(x, a, h, starts, part)
        outputs.append((x.c[part].unsqueeze(-2) @ states).squeeze(-2))
        h = states[-1]
    y = torch.cat(outputs).movedim(0, 1).flatten(2).contiguous()
    return y, h.mT.flatten(1, 2).clone()  # a copy: a view would keep all states in memory


def _backward(
    grad: Tensor,
    grad_after: Tensor,
    x: ScanSignals,
    a: Tensor,
    state: Tensor,
    starts: Tensor | None,
) -> Any:
    """Recompute the states block by block, last block first, and scan their gradients backward.

    The gradient g of the states obeys the same recurrence in reversed time,
    g_t = C_t dy_t + exp(dt_{t+1} A) g_{t+1}.
    """
    groups = x.b.shape[2]
    grad_y = grad.unflatten(2, (groups, -1)).movedim(1, 0)
    x, a, h = _inner(x, a, state)
    u, dt, b, c = x
    before = []
    for part in _blocks(dt, a):
        before.append(h)
        h = _run(x, a, h, starts, part)[1][-1]
    g = grad_after.unflatten(1, (groups, -1)).mT
    grad_u, grad_dt, grad_b, grad_c = (torch.empty_like(t) for t in (u, dt, b, c))
    grad_a = torch.zeros_like(a)
    for part, h in zip(reversed(list(_blocks(dt, a))), reversed(before), strict=True):
        decay, states = _run(x, a, h, starts, part)
        adjoint = c[part].unsqueeze(-1) * grad_y[part].unsqueeze(-2)
        adjoint[-1] += g
        for t in range(len(adjoint) - 2, -1, -1):
            adjoint[t].addcmul_(decay[t + 1], adjoint[t + 1])
        g = decay[0] * adjoint[0]
        grad_c[part] = (states @ grad_y[part].unsqueeze(-1)).squeeze(-1)
        grad_b[part] = (adjoint @ (dt[part] * u[part]).unsqueeze(-1)).squeeze(-1)
        grad_signal = (b[part].unsqueeze(-2) @ adjoint).squeeze(-2)
        decay[1:] *= states[:-1]
        decay[0] *= h
        through_decay = decay.mul_(adjoint)  # gradient of dt A
        grad_u[part] = dt[part] * grad_signal
        grad_dt[part] = u[part] * grad_signal + (through_decay * a).sum(dim=-2)
        grad_a += through_decay.mul_(dt[part].unsqueeze(-2)).sum(dim=(0, 1))
    signals = (t.movedim(0, 1) for t in (grad_u, grad_dt, grad_b, grad_c))
    return ScanSignals(*signals), grad_a.mT, g.mT


_scan = KernelOp(
    "selective_scan", _forward, _backward, lambda x, _, state, *__: empty_like(x.u, state)
)


def _inner(x: ScanSignals, a: Tensor, state: Tensor) -> tuple[ScanSignals, Tensor, Tensor]:
    """Signals (length, batch, group, ...), and A and states (..., group, d_state, channel)."""
    groups = x.b.shape[2]
    u, dt = (t.unflatten(2, (groups, -1)) for t in x[:2])
    signals = (t.movedim(1, 0).contiguous() for t in (u, dt, x.b, x.c))
    a, state = (t.unflatten(-2, (groups, -1)).mT.contiguous() for t in (a, state))
    return ScanSignals(*signals), a, state


def _blocks(dt: Tensor, a: Tensor) -> Iterator[slice]:
    """Split the time axis into blocks of at most ``BLOCK`` state entries."""
    size = max(1, BLOCK // max(1, dt.shape[1] * a.numel()))
    return (slice(start, start + size) for start in range(0, dt.shape[0], size))


def _run(
    x: ScanSignals, a: Tensor, h: Tensor, starts: Tensor | None, now: slice
) -> tuple[Tensor, Tensor]:
    """Decays and states of one block: (time, batch, group, d_state, channel of the group)."""
    u, dt, b = x.u[now], x.dt[now], x.b[now]
    decay = (dt.unsqueeze(-2) * a).exp_()
    if starts is not None:
        decay.masked_fill_(starts.mT[now][..., None, None, None], 0.0)
    states = (dt * u).unsqueeze(-2) * b.unsqueeze(-1)
    for decay_t, state_t in zip(decay.unbind(0), states.unbind(0), strict=True):
        h = state_t.addcmul_(decay_t, h)
    return decay, states
