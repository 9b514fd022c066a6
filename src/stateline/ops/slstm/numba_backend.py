"""sLSTM by its recurrence, in kernels compiled by numba for the CPU."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.kernel_op import KernelOp
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import fan_out, flat
from stateline.ops.slstm import SLSTMCell
from stateline.ops.slstm import numba_kernel as kernels
from stateline.ops.slstm.pytorch import empty_outputs

WORK = 0.3
"""Nanoseconds per token and entry of R, to decide whether to use threads."""

MOST_ROWS, MOST = 4, 2048
"""A call of PyTorch's operators takes as long for few numbers as for many, so that its products of
matrices gain where each has much to do: with more rows than read the matrix alone, and more numbers
in the state. Up to the second number the kernels gain with vectors of 4 and of 16 numbers, 1.1 to
1.5 times as fast there; with four times as many, products do (examples/kernel_gains.py)."""


can_use = launch.can_run


def gains(function: str, *inputs: Any) -> bool:  # noqa: ARG001
    """Whether a call is faster here than by products of matrices."""
    rows, _, _, heads, width = inputs[0].shape
    return rows <= MOST_ROWS or rows * heads * width <= MOST


def _run(
    gates: Tensor, weight: Tensor, state: SLSTMCell, *, keep: bool
) -> tuple[Tensor, SLSTMCell, Tensor]:
    """Outputs and the state after them, and what the backward pass needs."""
    dtype = launch.working_dtype(gates, weight, *state)
    (batch, length), (heads, width) = gates.shape[:2], state.h.shape[1:]
    y = torch.empty(batch, length, heads, width, dtype=dtype, device="cpu")
    after = SLSTMCell(*(torch.empty(x.shape, dtype=dtype, device="cpu") for x in state))
    trace = torch.empty(y.numel() * kernels.PARTS if keep else 0, dtype=dtype, device="cpu")
    arrays = (flat(x, dtype) for x in (gates, weight, *state, y, *after, trace))
    work = WORK * batch * length * weight.numel()
    fan_out(kernels.forward, (*arrays, length, heads, width), batch * heads, work)
    return y, after, trace


def _forward(gates: Tensor, weight: Tensor, state: SLSTMCell) -> tuple[Tensor, SLSTMCell]:
    y, after, _ = _run(gates, weight, state, keep=False)
    return y.to(gates.dtype), SLSTMCell(*(x.to(state.h.dtype) for x in after))


def _backward(
    grad: Tensor, grad_after: SLSTMCell, gates: Tensor, weight: Tensor, state: SLSTMCell
) -> Any:
    """Recompute the gates, and backpropagate through time; scales are constants."""
    y, _, trace = _run(gates, weight, state, keep=True)
    _, heads, width = state.h.shape
    dh, dc, dn = (x.to(y.dtype, copy=True).contiguous() for x in grad_after[:3])
    dgates = torch.empty(gates.shape, dtype=y.dtype, device="cpu")
    arrays = (flat(x, y.dtype) for x in (grad, weight, state.c, state.n, trace, dh, dc, dn, dgates))
    work = WORK * y.shape[0] * y.shape[1] * weight.numel()
    sizes = y.shape[1], heads, width
    fan_out(kernels.backward, (*arrays, *sizes), len(y) * heads, work)
    before = torch.cat([state.h.to(y.dtype)[:, None], y], dim=1)[:, :-1]
    dweight = torch.einsum("bthj,btghe->hjge", before, dgates)
    return dgates, dweight, SLSTMCell(dh, dc, dn, dc * state.c + dn * state.n)


slstm = KernelOp("slstm_kernel", _forward, _backward, empty_outputs)
