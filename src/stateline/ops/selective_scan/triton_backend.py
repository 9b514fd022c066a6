"""Selective scan in GPU kernels compiled by Triton: states in and out, recomputed backward."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.kernel_op import KernelOp, empty_like
from stateline.ops.selective_scan import ScanSignals
from stateline.ops.selective_scan import triton_kernel as selective
from stateline.ops.triton_common import launch
from stateline.ops.triton_common.launch import empty, on, round_up
from stateline.ops.triton_common.steps import changing

MOST_STATES = 256
"""Largest state of a channel."""

ENTRIES = 4096
"""Entries of the states of a tile, which a program holds in registers."""

PROGRAMS = 512
"""Programs that keep a GPU busy; with fewer rows, each has fewer channels."""


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    if inputs[1].shape[1] > MOST_STATES:
        return f"the Triton kernel takes up to {MOST_STATES} states of a channel"
    step = function.startswith("selective_scan_step")
    return launch.can_step(*inputs) if step else launch.can_use(*inputs)


def selective_scan(
    x: ScanSignals, a: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scan the tokens of each row, tile by tile."""
    y, after = _scan(x, a.float(), state.float(), starts)
    return y, after.to(state.dtype)


def selective_scan_step_(x: ScanSignals, a: Tensor, state: Tensor) -> Tensor:
    """One token in one launch; the state changes in place."""
    token = ScanSignals(*(t[:, None] for t in x))
    with changing(state) as (held,):
        y = _launch(token, a.float(), held, None, last=held)
    return y[:, 0].to(x.u.dtype)


def _compiled(
    u: Tensor, a: Tensor, b: Tensor, starts: Tensor | None
) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and what the kernels are compiled for."""
    rows, each, groups = len(u), u.shape[2] // b.shape[2], b.shape[2]
    entries, width = round_up(a.shape[1], 1), min(16, round_up(each, 1))
    while width > 1 and (width * entries * 16 > ENTRIES or rows * u.shape[2] < PROGRAMS * width):
        width //= 2
    times = 1 if u.shape[1] == 1 else max(16, min(64, ENTRIES // (width * entries)))
    sizes = {"TIMES": times, "WIDTH": width, "N": entries}
    return (groups * -(-each // width), rows), {**sizes, "RESETS": starts is not None}


def _bytes(u: Tensor, starts: Tensor | None) -> Tensor:
    """The starts as kernels read them; any tensor in place of none."""
    return u if starts is None else starts.contiguous().view(torch.uint8)


def _forward(
    x: ScanSignals, a: Tensor, first: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    last = empty(tuple(first.shape), first)
    return _launch(x, a, first, starts, last).to(x.u.dtype), last


def _launch(
    x: ScanSignals, a: Tensor, first: Tensor, starts: Tensor | None, last: Tensor | None
) -> Tensor:
    """Run the forward kernel: the outputs; without ``last``, the states before every tile."""
    u, dt, b, c = (t.contiguous() for t in x)
    a, first = a.contiguous(), first.contiguous()
    grid, compiled = _compiled(u, a, b, starts)
    tiles = -(-u.shape[1] // compiled["TIMES"])
    found = empty((len(u), tiles, *a.shape), first) if last is None else empty(tuple(u.shape), u)
    places = (u, first, found) if last is None else (found, last, first)
    sizes = u.shape[1], u.shape[2], b.shape[2], a.shape[1]
    with on(u):
        selective.forward[grid](
            u, dt, b, c, a, first, *places, _bytes(u, starts), *sizes,
            OUTPUT=last is not None, **compiled,
        )  # fmt: skip
    return found


def _backward(
    grad: Tensor, grad_last: Tensor, x: ScanSignals, a: Tensor, first: Tensor, starts: Tensor | None
) -> Any:
    """Scan the gradients of the states backward; the states are computed again."""
    carries = _launch(x, a, first, starts, last=None)
    u, dt, b, c, a, *grads = (t.contiguous() for t in (*x, a, grad, grad_last))
    grid, compiled = _compiled(u, a, b, starts)
    blocks = grid[0] // b.shape[2]
    du, ddt = empty(tuple(u.shape), u), empty(tuple(dt.shape), dt)
    da, dfirst = (empty(tuple(first.shape), first) for _ in range(2))
    db, dc = (empty((blocks, *b.shape), first) for _ in range(2))
    with on(u):
        selective.backward[grid](
            u, dt, b, c, a, carries, _bytes(u, starts), *grads, du, ddt, da, db, dc, dfirst,
            u.shape[1], u.shape[2], b.shape[2], a.shape[1], **compiled, num_warps=8,
        )  # fmt: skip
    return ScanSignals(du, ddt, db.sum(dim=0), dc.sum(dim=0)), da.sum(dim=0), dfirst


_scan = KernelOp(
    "selective_scan_triton", _forward, _backward, lambda x, _, first, *__: empty_like(x.u, first)
)
