"""sLSTM by its recurrence, in kernels compiled by numba for the CPU."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.kernel_op import define_kernel_op, empty_like, like
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import fan_out, flat
from stateline.ops.slstm import SLSTMCell
from stateline.ops.slstm import numba_kernel as kernels

WORK = 0.3
"""Nanoseconds per token and entry of R, to tell whether threads pay."""


MOST_ROWS = 4
"""Rows up to which the kernels are faster than PyTorch's products of matrices, which serve all rows
at once. See ``examples/kernel_gains.py``: an update of ``slstm*2`` is 2.8 times faster with one row
of 256 tokens at width 256, and 2.1 times with four of 128 at width 128 (Zen 5, one thread)."""


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernels cannot run this call, or an empty string."""
    if len(inputs[0]) > MOST_ROWS:
        return f"products of matrices are faster from {MOST_ROWS + 1} rows on"
    return launch.can_use(*inputs)


def slstm(gates: Tensor, weight: Tensor, state: SLSTMCell) -> tuple[Tensor, SLSTMCell]:
    """Run the recurrence."""
    y, *after = _whole(gates, weight, *state)
    return y, SLSTMCell(*after)


def _run(inputs: tuple[Tensor, ...], keep: bool) -> tuple[list[Tensor], Tensor]:
    """Outputs and the state after them, and what the backward pass needs."""
    gates, _, h, *_ = inputs
    dtype = launch.working_dtype(*inputs)
    batch, length = gates.shape[:2]
    _, heads, width = h.shape
    y = torch.empty(batch, length, heads, width, dtype=dtype)
    found = [y, *(torch.empty(h.shape, dtype=dtype) for _ in range(4))]
    trace = torch.empty(y.numel() * kernels.PARTS if keep else 0, dtype=dtype)
    arrays = [flat(x, dtype) for x in inputs] + [x.numpy().reshape(-1) for x in (*found, trace)]
    work = WORK * batch * length * inputs[1].numel()
    fan_out(kernels.forward, (*arrays, length, heads, width), batch * heads, work)
    return found, trace


def _forward(
    gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, n: Tensor, m: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (y, *after), _ = _run((gates, weight, h, c, n, m), keep=False)
    h_, c_, n_, m_ = (x.to(h.dtype) for x in after)
    return y.to(gates.dtype), h_, c_, n_, m_


def _backward(  # noqa: PLR0913
    grad: Tensor,
    grad_h: Tensor,
    grad_c: Tensor,
    grad_n: Tensor,
    grad_m: Tensor,  # noqa: ARG001
    gates: Tensor,
    weight: Tensor,
    h: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Recompute the gates, and backpropagate through time; scales are constants."""
    inputs = gates, weight, h, c, n, m
    (y, *_), trace = _run(inputs, keep=True)
    _, heads, width = h.shape
    dh, dc, dn = (x.to(y.dtype, copy=True).contiguous() for x in (grad_h, grad_c, grad_n))
    dgates = torch.empty(gates.shape, dtype=y.dtype)
    arrays = (flat(x, y.dtype) for x in (grad, weight, c, n, trace, dh, dc, dn, dgates))
    work = WORK * y.shape[0] * y.shape[1] * weight.numel()
    sizes = y.shape[1], heads, width
    fan_out(kernels.backward, (*arrays, *sizes), len(y) * heads, work)
    before = torch.cat([h.to(y.dtype)[:, None], y], dim=1)[:, :-1]
    dweight = torch.einsum("bthj,btghe->hjge", before, dgates)
    return like((dgates, dweight, dh, dc, dn, dc * c + dn * n), inputs)


_whole = define_kernel_op(
    "slstm_kernel",
    _forward,
    _backward,
    lambda gates, _weight, *state: (
        gates.new_empty((*gates.shape[:2], *gates.shape[3:])),
        *empty_like(*state),
    ),
    lambda *inputs: empty_like(*inputs[5:]),
)
