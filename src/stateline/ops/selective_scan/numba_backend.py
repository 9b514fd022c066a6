"""Selective scan, token by token, in kernels compiled by numba for the CPU."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stateline.ops.kernel_op import define_kernel_op, empty_like, like
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.blocks import MODES
from stateline.ops.numba_common.launch import fan_out, flat, step_in_place
from stateline.ops.numba_common.vector import LANES
from stateline.ops.selective_scan.numba_kernel import backward, forward, selective_step
from stateline.ops.stepping import on_a_copy

Array = NDArray[Any]

FORWARD, BACKWARD, STEP = 0.3, 1.5, 1.0
"""Nanoseconds per position and state, to tell whether threads pay."""

TASKS = 8
"""Least number of tasks of the backward pass; fixed, so that threads do not change a sum."""


can_use = launch.can_run


def selective_scan(
    u: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence."""
    return _scan(u, dt, a, b, c, state, starts)


def selective_scan_step_(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> Tensor:
    """The recurrence, once, on a state that changes in place."""
    return step_in_place(selective_step, (u, dt, a, b, c), state, u, STEP)


selective_scan_step = on_a_copy(selective_scan_step_)


def _arrays(
    u: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    starts: Tensor | None,
) -> tuple[torch.dtype, list[Array], Array | None, tuple[int, int, int, int]]:
    """Precision, flat arrays with padded states in b and c, factors of decays, and sizes."""
    dtype = launch.working_dtype(u, dt, a, b, c, state)
    padding = -a.shape[1] % MODES
    if padding:
        b, c = (F.pad(x.detach(), (0, padding)) for x in (b, c))
    sizes = u.shape[1], u.shape[2], a.shape[1], b.shape[2]
    stays = None if starts is None else flat(~starts, dtype)
    return dtype, [flat(x, dtype) for x in (u, dt, a, b, c, state)], stays, sizes


def _blocks(channels: int, groups: int) -> int:
    return -(-(channels // groups) // LANES) * groups


def _forward(
    u: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    dtype, arrays, stays, sizes = _arrays(u, dt, a, b, c, state, starts)
    y, after = torch.empty(u.shape, dtype=dtype), torch.empty(state.shape, dtype=dtype)
    tasks = u.shape[0] * _blocks(u.shape[2], b.shape[2])
    work = u.numel() * a.shape[1] * FORWARD
    outputs = flat(y, dtype), flat(after, dtype)
    fan_out(forward, (*arrays, stays, *outputs, *sizes), tasks, work)
    return y.to(u.dtype), after.to(state.dtype)


def _backward(  # noqa: PLR0913
    grad: Tensor,
    grad_after: Tensor,
    u: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype, arrays, stays, sizes = _arrays(u, dt, a, b, c, state, starts)
    batch, blocks = u.shape[0], _blocks(u.shape[2], b.shape[2])
    pieces = max(1, min(blocks, TASKS // max(batch, 1)))
    u_, dt_, _, b_, _, state_ = arrays
    du, ddt, da, dstate = (np.empty_like(x) for x in (u_, dt_, state_, state_))
    db, dc = np.zeros((2, pieces * b_.size), b_.dtype)
    grads = (flat(x, dtype) for x in (grad, grad_after))
    fan_out(
        backward,
        (*grads, *arrays, stays, du, ddt, da, db, dc, dstate, batch, *sizes, pieces),
        batch * pieces,
        u.numel() * a.shape[1] * BACKWARD,
    )
    whole = (pieces, *b.shape[:3], a.shape[1] + -a.shape[1] % MODES)
    db, dc = (x.reshape(whole).sum(0)[..., : a.shape[1]] for x in (db, dc))
    da = da.reshape(batch, *a.shape).sum(0)
    return like((du, ddt, da, db, dc, dstate), (u, dt, a, b, c, state))


_scan = define_kernel_op(
    "selective_scan_kernel",
    _forward,
    _backward,
    lambda *inputs: empty_like(inputs[0], inputs[5]),
    lambda _grad, _grad_after, *inputs: empty_like(*inputs[:6]),
)
