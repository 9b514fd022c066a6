"""Linear attention by its recurrence, in kernels compiled by numba for the CPU."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.kernel_op import define_kernel_op, empty_like, like
from stateline.ops.linear_attention.numba_kernel import scan
from stateline.ops.numba_common import launch, steps
from stateline.ops.numba_common.launch import array, fan_out, flat
from stateline.ops.numba_common.vector import LANES

WORK = 0.05
"""Nanoseconds per token and entry of the state, to tell whether threads pay."""

WIDEST = 64
"""Keys and values of a head up to which this is faster than PyTorch's products."""


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    if function == "linear_attention_step":
        return launch.can_step(*inputs)
    if max(inputs[0].shape[-1], inputs[2].shape[-1]) > WIDEST:
        return "PyTorch's products are faster for wide heads"
    return launch.can_use(*inputs)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence, with the state in registers."""
    y, after = _whole(q, k, v, v.new_empty(0) if log_decay is None else log_decay, state)
    return y, after


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence once."""
    decays = [] if log_decay is None else [log_decay]
    dtype = launch.working_dtype(q, k, v, state, *decays)
    y, after = torch.empty(v.shape, dtype=dtype), torch.empty(state.shape, dtype=dtype)
    arguments = [None if x is None else array(x, dtype) for x in (q, k, v, log_decay, state)]
    outputs = (array(y, dtype), array(after, dtype))
    fan_out(steps.linear_attention_step, (*arguments, *outputs), len(v), state.numel() * 0.5)
    return y.to(v.dtype), after.to(state.dtype)


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor,
    *,
    old: bool = False,
    backwards: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs for every head, and the state at the end, in the dtype of the state.

    Args:
        q: What reads the state (batch, length, head, key); may have fewer heads, as the next two.
        k: What is written at its keys.
        v: Its values (batch, length, head, value).
        decay: Factor of the state before each token (batch, length, head).
        state: State at the beginning (batch, head, key, value).
        old: Whether outputs leave out what their own token writes.
        backwards: Whether time runs from the last token to the first.
    """
    (batch, length, heads), (keys, values), dtype = decay.shape, state.shape[2:], state.dtype
    y = torch.empty((batch, length, heads, values), dtype=dtype)
    after = torch.empty(state.shape, dtype=dtype)
    arrays = (flat(x, dtype) for x in (q, k, v, decay, y, state, after))
    sizes = length, heads, q.shape[2], k.shape[2], v.shape[2], keys, values
    tasks = batch * heads * -(-values // LANES)
    fan_out(scan, (*arrays, *sizes, old, backwards), tasks, WORK * length * state.numel())
    return y, after


def _decay(log_decay: Tensor, v: Tensor) -> Tensor:
    """Factors of the state; an empty ``log_decay`` means no decay."""
    return log_decay.exp() if log_decay.numel() else log_decay.new_ones(v.shape[:3])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    dtype = launch.working_dtype(q, k, v, log_decay, state)
    y, after = _scan(q, k, v, _decay(log_decay.to(dtype), v), state.to(dtype))
    return y.to(v.dtype), after.to(state.dtype)


def _backward(
    grad: Tensor,
    grad_after: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients; that of ``log_decay`` follows from those of q and k.

    With G the gradient of the state, E_t = <g_t S_{t-1}, G_t> is the gradient of log g_t, and
    E_t = E_{t+1} + q_t . dq_t - k_t . dk_t. What a token writes and reads itself cancels, so it is
    left out of both, and added to dq and dk afterwards.
    """
    inputs = (q, k, v, log_decay, state)
    dtype = launch.working_dtype(*inputs)
    grad, grad_after, q, k, v, log_decay, state = (x.to(dtype) for x in (grad, grad_after, *inputs))
    decay, decays, groups = _decay(log_decay, v), log_decay.numel() > 0, q.shape[2]
    later = torch.cat([decay[:, 1:], torch.ones_like(decay[:, :1])], dim=1)[:, : v.shape[1]]
    dq, after = _scan(grad, v, k, decay, state.mT, old=decays)
    dk, _ = _scan(v, grad, q, later, grad_after.mT, old=decays, backwards=True)
    dv, dstate = _scan(k, q, grad, later, grad_after, backwards=True)
    if not decays:
        dq, dk = (x.unflatten(2, (groups, -1)).sum(3) for x in (dq, dk))
        return like((dq, dk, dv, torch.empty_like(log_decay), dstate), inputs)
    steps = (_of_heads(q, dq) - _of_heads(k, dk)).double()
    total = (after.mT * grad_after).double().sum((-2, -1))
    dlog = total[:, None] + steps.flip(1).cumsum(1).flip(1)
    own = (grad * v).sum(-1).unflatten(2, (groups, -1)).sum(-1, keepdim=True)
    dq, dk = (x.unflatten(2, (groups, -1)).sum(3) for x in (dq, dk))
    dstate = dstate * decay[:, 0, :, None, None]
    return like((dq + own * k, dk + own * q, dv, dlog, dstate), inputs)


def _of_heads(x: Tensor, gradient: Tensor) -> Tensor:
    """Products of queries or keys with their gradients for every head: (batch, length, head)."""
    grouped = gradient.unflatten(2, (x.shape[2], -1))
    return (x[:, :, :, None] * grouped).sum(-1).flatten(2)


_whole = define_kernel_op(
    "linear_attention_kernel",
    _forward,
    _backward,
    lambda *inputs: empty_like(inputs[2], inputs[4]),
    lambda _grad, _grad_after, *inputs: empty_like(*inputs),
)
