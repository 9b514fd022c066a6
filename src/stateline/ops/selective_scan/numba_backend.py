"""Selective scan, token by token, in kernels compiled by numba for the CPU."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stateline.ops.kernel_op import KernelOp, empty_like
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.blocks import MODES
from stateline.ops.numba_common.launch import fan_out, flat, step_in_place
from stateline.ops.numba_common.vector import LANES
from stateline.ops.selective_scan import ScanSignals
from stateline.ops.selective_scan.numba_kernel import backward, forward, selective_step

Array = NDArray[Any]

FORWARD, BACKWARD, STEP = 0.3, 1.5, 1.0
"""Nanoseconds per position and state, to decide whether to use threads."""

TASKS = 8
"""Least number of tasks of the backward pass; fixed, so threads do not change the rounding."""

can_use = launch.can_run


def selective_scan(
    x: ScanSignals, a: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence."""
    return _scan(x, a, state, starts)


def selective_scan_step_(x: ScanSignals, a: Tensor, state: Tensor) -> Tensor:
    """The recurrence, once, on a state that changes in place."""
    return step_in_place(selective_step, (*x, a), state, x.u, STEP)


def _arrays(
    x: ScanSignals, a: Tensor, state: Tensor, starts: Tensor | None
) -> tuple[torch.dtype, list[Array], Array | None, tuple[int, int, int, int]]:
    """Precision, flat arrays with padded states in b and c, factors of decays, and sizes."""
    dtype = launch.working_dtype(*x, a, state)
    if padding := -a.shape[1] % MODES:
        x = x._replace(b=F.pad(x.b, (0, padding)), c=F.pad(x.c, (0, padding)))
    sizes = *x.u.shape[1:], a.shape[1], x.b.shape[2]
    stays = None if starts is None else flat(~starts, dtype)
    return dtype, [flat(t, dtype) for t in (*x, a, state)], stays, sizes


def _blocks(channels: int, groups: int) -> int:
    return -(-(channels // groups) // LANES) * groups


def _forward(
    x: ScanSignals, a: Tensor, state: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype, arrays, stays, sizes = _arrays(x, a, state, starts)
    y, after = (torch.empty(t.shape, dtype=dtype, device="cpu") for t in (x.u, state))
    tasks = len(y) * _blocks(x.u.shape[2], x.b.shape[2])
    work = y.numel() * a.shape[1] * FORWARD
    fan_out(forward, (*arrays, stays, flat(y, dtype), flat(after, dtype), *sizes), tasks, work)
    return y.to(x.u.dtype), after.to(state.dtype)


def _backward(
    grad: Tensor,
    grad_after: Tensor,
    x: ScanSignals,
    a: Tensor,
    state: Tensor,
    starts: Tensor | None,
) -> Any:
    dtype, arrays, stays, sizes = _arrays(x, a, state, starts)
    batch, blocks = len(x.u), _blocks(x.u.shape[2], x.b.shape[2])
    pieces = max(1, min(blocks, TASKS // max(batch, 1)))
    u, dt, b, _, _, start = arrays
    du, ddt, da, dstart = (np.empty_like(t) for t in (u, dt, start, start))
    sums: Any = np.zeros((2, pieces * b.size), b.dtype)
    grads = (flat(t, dtype) for t in (grad, grad_after))
    fan_out(
        backward,
        (*grads, *arrays, stays, du, ddt, da, *sums, dstart, batch, *sizes, pieces),
        batch * pieces,
        u.size * a.shape[1] * BACKWARD,
    )
    whole = (pieces, *x.b.shape[:3], a.shape[1] + -a.shape[1] % MODES)
    of_b_and_c = (t.reshape(whole).sum(0)[..., : a.shape[1]] for t in sums)
    return (du, ddt, *of_b_and_c), da.reshape(batch, *a.shape).sum(0), dstart


_scan = KernelOp(
    "selective_scan_kernel", _forward, _backward, lambda x, _, state, *__: empty_like(x.u, state)
)
