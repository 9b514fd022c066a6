"""Selective scan in blocks of time, on any device.

Everything that does not depend on the state is computed for a whole block at once; one multiply-add
per token remains. A block fits into a processor's cache. Inside, time is the first axis and the
channels are the last.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from stateline.ops.kernel_op import define_kernel_op
from stateline.ops.selective_scan.reference import selective_scan_step, selective_scan_step_

__all__ = ["BLOCK", "selective_scan", "selective_scan_step", "selective_scan_step_"]

BLOCK = 1 << 18
"""Number of state entries of all tokens in a block: 1 MiB in float32."""


def selective_scan(
    u: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the operator in the dtype of the state, and split its one output."""
    u_, dt_, a_, b_, c_ = (t.to(state.dtype) for t in (u, dt, a, b, c))
    y, after = _scan(u_, dt_, a_, b_, c_, state, starts).split([u.shape[1], a.shape[1]], dim=1)
    return y.to(u.dtype), after.mT.clone()  # a copy: a view would keep all outputs in memory


def _forward(
    u: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    starts: Tensor | None,
) -> Tensor:
    """Outputs, then the last state, along the time axis: (batch, length + d_state, channel)."""
    u, dt, a, b, c, h = _inner(u, dt, a, b, c, state)
    outputs = []
    for now in _blocks(dt, a):
        _, states = _run(u, dt, a, b, h, starts, now)
        outputs.append((c[now].unsqueeze(-2) @ states).squeeze(-2))
        h = states[-1]
    return torch.cat([torch.cat([u[:0], *outputs]).movedim(0, 1).flatten(2), _outer(h)], dim=1)


def _backward(
    grad: Tensor,
    u: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Recompute the states block by block, last block first, and scan their gradients backward.

    The gradient g of the states obeys the same recurrence in reversed time,
    g_t = C_t dy_t + exp(dt_{t+1} A) g_{t+1}.
    """
    length, d_state = u.shape[1], a.shape[1]
    grad_y = grad[:, :length].unflatten(2, (b.shape[2], -1)).movedim(1, 0)
    u, dt, a, b, c, h = _inner(u, dt, a, b, c, state)
    before = []
    for now in _blocks(dt, a):
        before.append(h)
        h = _run(u, dt, a, b, h, starts, now)[1][-1]
    g = grad[:, length:].unflatten(2, (b.shape[2], -1)).movedim(2, 1)
    grad_u, grad_dt, grad_b, grad_c = (torch.empty_like(t) for t in (u, dt, b, c))
    grad_a = torch.zeros_like(a)
    for now, h in zip(reversed(list(_blocks(dt, a))), reversed(before), strict=True):
        decay, states = _run(u, dt, a, b, h, starts, now)
        adjoint = c[now].unsqueeze(-1) * grad_y[now].unsqueeze(-2)
        adjoint[-1] += g
        for t in range(len(adjoint) - 2, -1, -1):
            adjoint[t].addcmul_(decay[t + 1], adjoint[t + 1])
        g = decay[0] * adjoint[0]
        grad_c[now] = (states @ grad_y[now].unsqueeze(-1)).squeeze(-1)
        grad_b[now] = (adjoint @ (dt[now] * u[now]).unsqueeze(-1)).squeeze(-1)
        grad_signal = (b[now].unsqueeze(-2) @ adjoint).squeeze(-2)
        decay[1:] *= states[:-1]
        decay[0] *= h
        through_decay = decay.mul_(adjoint)  # gradient of dt A
        grad_u[now] = dt[now] * grad_signal
        grad_dt[now] = u[now] * grad_signal + (through_decay * a).sum(dim=-2)
        grad_a += through_decay.mul_(dt[now].unsqueeze(-2)).sum(dim=(0, 1))
    return (  # contiguous, because the compiler of autograd assumes it
        grad_u.movedim(0, 1).flatten(2).contiguous(),
        grad_dt.movedim(0, 1).flatten(2).contiguous(),
        grad_a.mT.reshape(-1, d_state).contiguous(),
        grad_b.movedim(0, 1).contiguous(),
        grad_c.movedim(0, 1).contiguous(),
        _outer(g).mT.contiguous(),
    )


_scan = define_kernel_op("selective_scan", _forward, _backward)


def _inner(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs as (length, batch, group, ...); A as (group, d_state, channel of the group)."""
    groups = b.shape[2]
    u, dt, a, state = (
        u.unflatten(2, (groups, -1)),
        dt.unflatten(2, (groups, -1)),
        a.unflatten(0, (groups, -1)).mT.contiguous(),
        state.unflatten(1, (groups, -1)).mT.contiguous(),
    )
    u, dt, b, c = (t.movedim(1, 0).contiguous() for t in (u, dt, b, c))
    return u, dt, a, b, c, state


def _outer(h: Tensor) -> Tensor:
    """A state (batch, group, d_state, channel of the group) as (batch, d_state, channel)."""
    return h.movedim(1, 2).flatten(2)


def _blocks(dt: Tensor, a: Tensor) -> Iterator[slice]:
    """Split the time axis into blocks of at most ``BLOCK`` state entries."""
    size = max(1, BLOCK // max(1, dt.shape[1] * a.numel()))
    return (slice(start, start + size) for start in range(0, dt.shape[0], size))


def _run(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, h: Tensor, starts: Tensor | None, now: slice
) -> tuple[Tensor, Tensor]:
    """Decays and states of one block: (time, batch, group, d_state, channel of the group)."""
    u, dt, b = u[now], dt[now], b[now]
    decay = (dt.unsqueeze(-2) * a).exp_()
    if starts is not None:
        decay.masked_fill_(starts.mT[now][..., None, None, None], 0.0)
    states = (dt * u).unsqueeze(-2) * b.unsqueeze(-1)
    for decay_t, state_t in zip(decay.unbind(0), states.unbind(0), strict=True):
        h = state_t.addcmul_(decay_t, h)
    return decay, states
