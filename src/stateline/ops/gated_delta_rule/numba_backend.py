"""Gated delta rule by its recurrence, in kernels compiled by numba for the CPU."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.dispatch import wants_gradient
from stateline.ops.gated_delta_rule import numba_kernel as delta
from stateline.ops.kernel_op import define_kernel_op, empty_like, like
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import fan_out, flat, step_in_place
from stateline.ops.numba_common.vector import LANES
from stateline.ops.starts import reset
from stateline.ops.stepping import on_a_copy

WORK, STEP = 0.06, 1.0
"""Nanoseconds per token and entry of the state, to tell whether threads pay."""

WIDEST = 128
"""Keys and values of a head up to which gradients are faster than by PyTorch's products."""

TIME = 256
"""Tokens after which kernels keep a state."""


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    if wants_gradient(*inputs) and max(x.shape[-1] for x in inputs[1:3]) > WIDEST:
        return "PyTorch's products are faster for gradients of wide heads"
    return launch.can_run(function, *inputs)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence."""
    log_decay = reset(log_decay, starts, v)
    y, after = _whole(q, k, v, log_decay, beta, state)
    return y, after


def gated_delta_rule_step_(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """The recurrence, once, on a state that changes in place."""
    return step_in_place(delta.gated_delta_step, (q, k, v, log_decay, beta), state, v, STEP)


gated_delta_rule_step = on_a_copy(gated_delta_rule_step_)


def whole_vectors(x: Tensor, *axes: int) -> Tensor:
    """Zeros after the entries of some axes, up to a multiple of the lanes."""
    for axis in axes:
        if missing := -x.shape[axis] % LANES:
            x = F.pad(x, (0, 0) * (-1 - axis) + (0, missing))
    return x


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> list[Tensor]:
    """The inputs as the kernels take them, with the decay itself."""
    dtype = launch.working_dtype(q, k, v, log_decay, beta, state)
    q, k, v, log_decay, beta, state = (
        x.detach().to(dtype) for x in (q, k, v, log_decay, beta, state)
    )
    q, k, v = (whole_vectors(x, -1) for x in (q, k, v))
    return [q, k, v, beta, log_decay.exp(), whole_vectors(state, -1, -2)]


def _scan(
    kernel: Any, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], *others: Any
) -> Tensor:
    """Run a kernel on inputs that end with decay and state; return the states that it keeps.

    These have the shape (batch, head, block of ``TIME`` tokens, row, lane): one state per block.
    """
    decay, state = (x for x in inputs[-2:] if x is not None)
    (batch, length, heads), (rows, width) = decay.shape, state.shape[2:]
    states = state.new_empty(batch, heads, max(1, -(-length // TIME)), rows, width)
    arrays = (None if x is None else flat(x, state.dtype) for x in (*inputs, *outputs, states))
    arguments = (*arrays, length, TIME, heads, rows, width, *others)
    fan_out(kernel, arguments, batch * heads * width // LANES, WORK * length * state.numel())
    return states


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    inputs, (keys, values) = (q, k, v, log_decay, beta, state), state.shape[2:]
    q, k, v, beta, decay, start = _prepared(*inputs)
    y = torch.empty_like(v)
    states = _scan(delta.forward, (k, q, k, v, beta, decay, start), (None, y), False)
    y, after = y[..., :values], states[:, :, -1, :keys, :values]
    after = after.clone(memory_format=torch.contiguous_format)  # or it would keep all states alive
    return y.to(inputs[2].dtype).contiguous(), after.to(state.dtype)


def _backward(
    grad: Tensor,
    grad_after: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients, from the states S and their adjoints A.

    With w = v - S'k, S' the decayed state, and p = G'k, G the gradient of a state that a token
    wrote: dv = beta p, dbeta = w . p, dq = S dy and dk = beta (G w - S' p).
    """
    inputs, (keys, values) = (q, k, v, log_decay, beta, state), state.shape[2:]
    q, k, v, beta, decay, start = _prepared(*inputs)
    dy, dend = whole_vectors(grad.to(v.dtype), -1), whole_vectors(grad_after.to(v.dtype), -1, -2)
    w, p = torch.empty_like(v), torch.empty_like(v)
    dq, dk, found = (torch.empty_like(k) for _ in range(3))
    states = _scan(delta.forward, (k, None, k, v, beta, decay, start), (w, None), False)
    adjoints = _scan(delta.adjoint, (k, q, k, dy, None, beta, decay, dend), (p,))
    _scan(delta.forward, (p, dy, w, k, beta, decay, start.mT), (found, dq), True)
    _scan(delta.adjoint, (w, dy, p, q, k, beta, decay, dend.mT), (dk,))
    later = torch.cat([adjoints[:, :, 1:], dend[:, :, None]], dim=2)
    steps = _dots(q, dq) - beta * _dots(v, p)
    dlog = _from_borders(steps, _dots(states.flatten(3), later.flatten(3)))
    dq, dk, dv = dq[..., :keys], dk.sub_(found)[..., :keys], (beta[..., None] * p)[..., :values]
    return like((dq, dk, dv, dlog, _dots(w, p), adjoints[:, :, 0, :keys, :values]), inputs)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Products of the vectors in the last axis."""
    return torch.einsum("...i,...i->...", a, b)


def _from_borders(steps: Tensor, borders: Tensor) -> Tensor:
    """Gradient of ``log_decay``: E_t = <S_(t-1), A_(t-1)> = E_(t+1) + q_t . dq_t - v_t . dv_t.

    It starts anew at the end of each block of ``TIME`` tokens, from the products of states and
    adjoints there, so that rounding errors do not add up over time.

    Args:
        steps: The differences (batch, length, head).
        borders: The products (batch, head, block).
    """
    (_, length, _), count = steps.shape, borders.shape[2]
    steps = F.pad(steps.mT.double(), (0, count * TIME - length)).unflatten(2, (count, TIME))
    sums = steps.flip(3).cumsum(3).flip(3) + borders[..., None]
    return sums.flatten(2)[..., :length].mT


_whole = define_kernel_op(
    "gated_delta_rule_kernel",
    _forward,
    _backward,
    lambda *inputs: empty_like(inputs[2], inputs[5]),
)
