"""Delta rule by its recurrence, in kernels compiled by numba for the CPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stateline.ops.delta_rule import numba_kernel as delta
from stateline.ops.gated_delta_rule.numba_backend import whole_vectors
from stateline.ops.kernel_op import define_kernel_op, empty_like, like
from stateline.ops.linear_attention.numba_backend import from_both_ends
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import fan_out, flat, step_in_place
from stateline.ops.numba_common.vector import LANES
from stateline.ops.starts import reset
from stateline.ops.stepping import on_a_copy

WORK, STEP = 0.08, 1.0
"""Nanoseconds per token and entry of the state, to tell whether threads pay."""


can_use = launch.can_run


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence."""
    log_decay = reset(log_decay, starts, v)
    y, after = _whole(q, k, v, log_decay, a, b, state)
    return y, after


def delta_rule_step_(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> Tensor:
    """The recurrence, once, on a state that changes in place."""
    return step_in_place(delta.delta_rule_step, (q, k, v, log_decay, a, b), state, v, STEP)


delta_rule_step = on_a_copy(delta_rule_step_)


def _prepared(*inputs: Tensor) -> list[Tensor]:
    """Signals and state in the precision of the kernels, their entries in whole vectors."""
    dtype = launch.working_dtype(*inputs)
    *signals, state = (x.detach().to(dtype) for x in inputs)
    signals[3] = signals[3].exp()
    return [*(whole_vectors(x, -1) for x in signals), whole_vectors(state, -1, -2)]


def _scan(
    kernel: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], backwards: bool
) -> None:
    """Run a kernel on signals (batch, length, head, ...) and a state, which is the last input."""
    state = inputs[-1]
    (batch, heads, rows, width), length = state.shape, inputs[0].shape[1]
    arrays = (flat(x, state.dtype) for x in (*inputs, *outputs))
    arguments = (*arrays, length, heads, rows, width, backwards)
    fan_out(kernel, arguments, batch * heads * width // LANES, WORK * length * state.numel())


def _advanced(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What tokens find, what queries find before the token's write, and the state at the end."""
    found, y, after = torch.empty_like(v), torch.empty_like(v), torch.empty_like(state)
    own = v.new_zeros(v.shape[:3])
    _scan(delta.lengthwise, (a, q * decay, b, k, v, own, decay, state), (found, y, after), False)
    return found, y, after


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    keys, values = state.shape[2:]
    signals = _prepared(q, k, v, log_decay, a, b, state)
    found, y, after = _advanced(*signals)
    q_, k_, v_, _, _, b_, _ = signals
    y += _dots(q_, b_) * found + _dots(q_, k_) * v_
    after = after[:, :, :keys, :values].clone(memory_format=torch.contiguous_format)
    return y[..., :values].to(v.dtype).contiguous(), after.to(state.dtype)


def _backward(  # noqa: PLR0913
    grad: Tensor,
    grad_after: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients, from the states S and their adjoints A.

    With u = S_{t-1}' a, A the gradient of the state that later tokens see, and p = (A + q dy')' b:
    dv = (A + q dy')' k, dq = S_t dy, da = S_{t-1} p, dk = (A + q dy') v and db = (A + q dy') u.
    What a token writes and reads itself cancels in the gradient of the decay, so it is added last.
    """
    inputs, (keys, values) = (q, k, v, log_decay, a, b, state), state.shape[2:]
    q, k, v, decay, a, b, start = _prepared(*inputs)
    dy, dend = whole_vectors(grad.to(v.dtype), -1), whole_vectors(grad_after.to(v.dtype), -1, -2)
    u, _, after = _advanced(q, k, v, decay, a, b, start)
    p, dv, dstart = torch.empty_like(v), torch.empty_like(v), torch.empty_like(start)
    decayed_q, own = decay * q, _dots(q, b).squeeze(-1)
    _scan(delta.lengthwise, (b, k, a, decayed_q, dy, own, decay, dend), (p, dv, dstart), True)
    da, dq, dk, db = (torch.empty_like(k) for _ in range(4))
    _scan(delta.crosswise, (p, dy, u, b, v, k, decay, start.mT), (da, dq), False)
    _scan(delta.crosswise, (v, u, dy, decayed_q, p, a, decay, dend.mT), (dk, db), True)
    dq = decay * dq
    plus, minus = (q * dq).double(), (k * dk + b * db).double()
    removed = (a * da).double()
    plus[:, :-1] += removed[:, 1:]
    first, last = ((x * g).double().sum(-1)[:, None] for x, g in ((start, dstart), (after, dend)))
    dlog = from_both_ends(plus, minus, first - removed[:, :1], last)
    dv = dv + _dots(k, q) * dy
    of_u, of_v = _dots(dy, u), _dots(dy, v)
    dq, dk, db = dq + of_u * b + of_v * k, dk + of_v * q, db + of_u * q
    dstart = dstart[:, :, :keys, :values]
    found = (*(x[..., :keys] for x in (dq, dk)), dv[..., :values])
    found = (*found, *(x[..., :keys] for x in (dlog, da, db)), dstart)
    return like(found, inputs)


def _dots(x: Tensor, w: Tensor) -> Tensor:
    """Products of the vectors in the last axis, which stays with one entry."""
    return torch.einsum("...i,...i->...", x, w)[..., None]


_whole = define_kernel_op(
    "delta_rule_kernel", _forward, _backward, lambda *inputs: empty_like(inputs[2], inputs[6])
)
