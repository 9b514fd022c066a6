"""Linear attention by its recurrence, in kernels compiled by numba for the CPU."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stateline.ops.dispatch import wants_gradient
from stateline.ops.kernel_op import KernelOp, empty_like
from stateline.ops.linear_attention import LinearSignals
from stateline.ops.linear_attention import numba_kernel as kernels
from stateline.ops.linear_attention.numba_kernel import CHUNK
from stateline.ops.linear_attention.reference import rows_of
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import fan_out, flat, step_in_place
from stateline.ops.numba_common.vector import LANES

WORK, STEP = 0.05, 0.5
"""Nanoseconds per token and entry of the state, to decide whether to use threads."""

LEAST = math.inf if LANES == 16 else 2048
"""With one decay per head, chunks are faster than the recurrence for states of at least this size.

Never with AVX-512, where a loaded entry of a key or query serves 16 values.
"""

LONG = 64, 2048
"""On SSE and without decay, the recurrence is faster than PyTorch's products from this number of
tokens: without and with gradients."""

can_use = launch.can_run


def gains(function: str, *inputs: Any) -> bool:
    """Whether a call is faster here: with vectors of SSE and without a decay, only long ones."""
    if LANES > 4 or function != "linear_attention" or inputs[0].log_decay is not None:
        return True
    return inputs[0].v.shape[1] >= LONG[wants_gradient(*inputs)]


def linear_attention(
    x: LinearSignals, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence, with the state in registers."""
    x = x.reset(starts)
    return _whole(x.with_own_keys() if x.decays_by_entry else x, state)


def linear_attention_step_(x: LinearSignals, state: Tensor) -> Tensor:
    """The recurrence, once, on a state that changes in place."""
    if x.log_decay is not None and x.log_decay.ndim == 2:
        x = x._replace(log_decay=x.log_decay[..., None])
    return step_in_place(kernels.linear_attention_step, x, state, x.v, STEP)


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor,
    *,
    against: Tensor | None = None,
    old: bool = False,
    backwards: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, the state at the end, and products of outputs, in the dtype of the state.

    Args:
        q: Queries, which read the state (batch, length, head, key). ``q``, ``k`` and ``v`` may have
            fewer heads than the state.
        k: Keys, where tokens write.
        v: Values, which tokens write (batch, length, head, value).
        decay: Factors of the state before each token: of all of it (batch, length, head, 1, 1), of
            its rows (batch, length, head, key, 1) or its columns (batch, length, head, 1, value).
        state: State at the beginning (batch, head, key, value).
        against: If given, outputs are summed over groups of heads to the shape of ``against``, and
            the products are the dot products of its vectors with the outputs of every head.
        old: Whether a token reads the state before its own write.
        backwards: Whether time runs from the last token to the first.
    """
    (batch, length, heads), (keys, values), dtype = decay.shape[:3], state.shape[2:], state.dtype
    rows = decay if decay.shape[-2] > 1 else None
    columns = decay if decay.shape[-1] > 1 else None
    whole = decay[:0] if decay.shape[-2:].numel() > 1 else decay
    outputs, blocks = heads if against is None else against.shape[2], -(-values // LANES)
    y = torch.empty((batch, length, outputs, values), dtype=dtype, device="cpu")
    after = torch.empty(state.shape, dtype=dtype, device="cpu")
    dots = torch.empty(
        (0 if against is None else blocks, batch, length, heads), dtype=dtype, device="cpu"
    )
    signals = [None if x is None else flat(x, dtype) for x in (q, k, v, against, rows, columns)]
    one, results = flat(whole, dtype), (flat(x, dtype) for x in (y, dots, state, after))
    work, chunks = WORK * length * state.numel(), -(-length // CHUNK)
    size = batch * heads * chunks * CHUNK if len(one) and keys * values >= LEAST else 0
    within = [np.empty(n, one.dtype) for n in (size * CHUNK, size, size)]
    if size:
        of = length, heads, q.shape[2], k.shape[2], keys
        arguments = *signals[:2], one, *within, *of, old, backwards
        fan_out(kernels.within, arguments, batch * chunks, work / 8)
    groups = (x.shape[2] for x in (q, k, v))
    sizes = batch, length, heads, *groups, outputs, keys, values
    arguments = *signals, one, *within, *results, *sizes, old, backwards
    fan_out(kernels.scan, arguments, batch * outputs * blocks, work)
    return y, after, dots.sum(0)


def _decay(x: LinearSignals, dtype: torch.dtype) -> Tensor:
    """Factors of the state (batch, length, head, key or 1, 1)."""
    if x.log_decay is None:
        return torch.ones(*x.v.shape[:3], 1, 1, dtype=dtype, device="cpu")
    return rows_of(x.log_decay.to(dtype).exp(), x.v)


def _forward(x: LinearSignals, state: Tensor) -> tuple[Tensor, Tensor]:
    dtype = launch.working_dtype(*x, state)
    y, after, _ = _scan(x.q, x.k, x.v, _decay(x, dtype), state.to(dtype))
    return y.to(x.v.dtype), after.to(state.dtype)


def _backward(grad: Tensor, grad_after: Tensor, x: LinearSignals, state: Tensor) -> Any:
    """Gradients; the gradient of ``log_decay`` follows from the gradients of q and k.

    With G the gradient of the state, E_t = <g_t S_{t-1}, G_t> is the gradient of log g_t, and
    E_t = E_{t+1} + q_t . dq_t - k_t . dk_t. What a token writes and reads itself cancels, so it is
    left out of both, and added to dq and dk afterwards.
    """
    dtype = launch.working_dtype(*x, state)
    grad, grad_after, q, k, v, state = (t.to(dtype) for t in (grad, grad_after, *x[:3], state))
    decay, decays = _decay(x, dtype), x.log_decay is not None
    later = torch.cat([decay[:, 1:], torch.ones_like(decay[:, :1])], dim=1)[:, : v.shape[1]]
    of = (None, None) if x.decays_by_entry else (q, k)
    dq, after, of_q = _scan(grad, v, k, decay.mT, state.mT, against=of[0], old=decays)
    dk, _, of_k = _scan(
        v, grad, q, later.mT, grad_after.mT, against=of[1], old=decays, backwards=True
    )
    dv, dstate, _ = _scan(k, q, grad, later, grad_after, backwards=True)
    if not decays:
        return LinearSignals(dq, dk, dv), dstate
    dstate = dstate * decay[:, :1].prod(dim=1)  # none, if there are no tokens
    ends = [(a * b).double().sum(-1) for a, b in ((state, dstate), (after.mT, grad_after))]
    if x.decays_by_entry:
        of_q, of_k = q * dq, k * dk
    else:
        ends = [x.sum(-1) for x in ends]
    first, last = (x[:, None] for x in ends)
    dlog = from_both_ends(of_q.double(), of_k.double(), first, last)
    own = (grad * v).sum(-1).unflatten(2, (q.shape[2], -1)).sum(-1, keepdim=True)
    return LinearSignals(dq + own * k, dk + own * q, dv, dlog), dstate


def from_both_ends(plus: Tensor, minus: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Gradient of ``log_decay``: E_t = E_{t+1} + plus_t - minus_t, summed from one of both ends.

    At each token, the end is chosen whose sum has the smaller terms, since rounding errors grow
    with the terms. So small gradients after a strong decay stay accurate.
    """
    steps, sizes = plus - minus, plus.abs() + minus.abs()
    forward, backward = first - steps.cumsum(1) + steps, last + steps.flip(1).cumsum(1).flip(1)
    rising = sizes.cumsum(1) - sizes
    falling = sizes.sum(1, keepdim=True) - rising
    return torch.where(rising + first.abs() < falling + last.abs(), forward, backward)


_whole = KernelOp(
    "linear_attention_kernel", _forward, _backward, lambda x, state: empty_like(x.v, state)
)
