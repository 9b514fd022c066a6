"""Delta rules by their recurrence, in kernels compiled by numba for the CPU."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.delta_rule import DeltaSignals
from stateline.ops.delta_rule import numba_kernel as delta
from stateline.ops.kernel_op import KernelOp, empty_like
from stateline.ops.linear_attention.numba_backend import from_both_ends
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import fan_out, flat, step_in_place
from stateline.ops.numba_common.vector import LANES

WORK, STEP = 0.08, 1.0
"""Nanoseconds per token and entry of the state, to decide whether to use threads."""

can_use = launch.can_run


def delta_rule(
    x: DeltaSignals, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence."""
    return _whole(x.reset(starts), state)


def delta_rule_step_(x: DeltaSignals, state: Tensor) -> Tensor:
    """The recurrence, once, on a state that changes in place."""
    return step_in_place(delta.delta_rule_step, x, state, x.v, STEP)


class Corrections(NamedTuple):
    """The signals of any delta rule, as the kernels take them.

    If k is ``None``, v is added to the value found at a, and the sum is written at b. Decays belong
    to entries, or to whole heads (batch, length, head, 1).
    """

    q: Tensor
    k: Any
    v: Tensor
    decay: Tensor
    a: Tensor
    b: Tensor


def padded(log_decay: Tensor, state: Tensor, *signals: Tensor) -> list[Tensor]:
    """Decay, state and signals in the kernels' precision, their entries in whole vectors.

    Decays of heads (batch, length, head) get one more axis.
    """
    dtype = launch.working_dtype(log_decay, state, *signals)
    decay = log_decay.to(dtype).exp()
    decay = decay[..., None] if decay.ndim == 3 else _whole_vectors(decay, -1)
    others = (_whole_vectors(x.to(dtype), -1) for x in signals)
    return [decay, _whole_vectors(state.to(dtype), -1, -2), *others]


def _prepared(x: DeltaSignals, state: Tensor) -> tuple[Corrections, Tensor]:
    decay, start, q, k, v, a, b = padded(x.log_decay, state, x.q, x.k, x.v, x.a, x.b)
    return Corrections(q, k, v, decay, a, b), start


def _whole_vectors(x: Tensor, *axes: int) -> Tensor:
    """Pad some axes with zeros at the end, up to a multiple of the lanes."""
    for axis in axes:
        if missing := -x.shape[axis] % LANES:
            x = F.pad(x, (0, 0) * (-1 - axis) + (0, missing))
    return x


def scan(
    inputs: Sequence[Tensor | None],
    decay: Tensor,
    state: Tensor,
    outputs: Sequence[Tensor | None],
    known: Tensor | None = None,
    backwards: bool = False,
) -> None:
    """Run the kernel on signals (batch, length, head, ...) and a state, transposed if ``known``."""
    (batch, heads, rows, width), length = state.shape, decay.shape[1]
    each = None if decay.shape[-1] == 1 else decay
    decays = (each, None, decay) if known is None else (None, each, decay)
    given = (*inputs, known, *decays, state, *outputs)
    arrays = (None if x is None else flat(x, state.dtype) for x in given)
    arguments = (*arrays, length, heads, rows, width, backwards)
    fan_out(delta.scan, arguments, batch * heads * width // LANES, WORK * length * state.numel())


def _advanced(x: Corrections, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What tokens find, what queries find before the token's write, and the state at the end."""
    q, k, v, decay, a, b = x
    found, y, after = empty_like(v, v, state)
    own = v.new_full(v.shape[:3], k is None)
    scan((a, decay * q, b, k, v, own), decay, state, (found, y, after))
    return found, y, after


def _forward(x: DeltaSignals, state: Tensor) -> tuple[Tensor, Tensor]:
    signals, start = _prepared(x, state)
    found, y, after = _advanced(signals, start)
    q, k, v, _, _, b = signals
    y.addcmul_(dots(q, b), found).addcmul_(dots(q, k), v)
    return cropped(y, after, x.v, state)


def cropped(y: Tensor, after: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and states without padding, in the dtypes of v and of the state before."""
    keys, values = state.shape[2:]
    after = after[:, :, :keys, :values].clone(memory_format=torch.contiguous_format)
    return y[..., :values].to(v.dtype).contiguous(), after.to(state.dtype)


def gradients(
    grad: Tensor, grad_after: Tensor, x: Corrections, start: Tensor
) -> tuple[Corrections, Tensor]:
    """Gradients of the signals and of the state before them; for decays, of their logarithms.

    With u = S_{t-1}' a, A the gradient of the state that later tokens see, and p = (A + q dy')' b:
    dv = (A + q dy')' k, dq = S_t dy, da = S_{t-1} p, dk = (A + q dy') v and db = (A + q dy') u.
    What a token writes and reads itself cancels in the gradient of the decay, so it is added last.
    """
    q, k, v, decay, a, b = x
    dy, dend = _whole_vectors(grad.to(v.dtype), -1), _whole_vectors(grad_after.to(v.dtype), -1, -2)
    u, _, after = _advanced(x, start)
    p, dv, dstart, da, dq, dk, db = empty_like(v, v, start, q, q, q, q)
    written, later, own = (None if k is None else v), decay * q, dots(q, b)
    scan((b, k, a, later, dy, own), decay, dend, (p, dv, dstart), backwards=True)
    scan((p, dy, u, written, k, None), decay, start.mT, (da, dq, None), known=b)
    scan((u, written, dy, p, a, None), decay, dend.mT, (db, dk, None), known=later, backwards=True)
    dq = decay * dq
    read, wrote, removed = q * dq, b * db if k is None else b * db + k * dk, a * da
    first, last = (start * dstart).double().sum(-1), (after * dend).double().sum(-1)
    if decay.shape[-1] == 1:
        read, wrote, removed = (t.sum(-1, keepdim=True) for t in (read, wrote, removed))
        first, last = first.sum(-1, keepdim=True), last.sum(-1, keepdim=True)
    read, wrote, removed = read.double(), wrote.double(), removed.double()
    read[:, :-1] += removed[:, 1:]
    dlog = from_both_ends(read, wrote, first[:, None] - removed[:, :1], last[:, None])
    of_u = dots(dy, u)
    dq, db = dq + of_u * b, db + of_u * q
    if k is None:
        return Corrections(dq, None, p, dlog, da, db), dstart
    of_v = dots(dy, v)
    dq, dk, dv = dq + of_v * k, dk + of_v * q, dv + dots(k, q) * dy
    return Corrections(dq, dk, dv, dlog, da, db), dstart


def _backward(grad: Tensor, grad_after: Tensor, x: DeltaSignals, state: Tensor) -> Any:
    found, dstart = gradients(grad, grad_after, *_prepared(x, state))
    of_x = (g[..., : signal.shape[-1]] for g, signal in zip(found, x, strict=True))
    return *of_x, dstart[:, :, : state.shape[2], : state.shape[3]]


def dots(x: Tensor, w: Tensor) -> Tensor:
    """Dot products over the last axis, which stays with size 1."""
    return (x * w).sum(-1, keepdim=True)  # torch.einsum takes a matrix product for each of them


_whole = KernelOp("delta_rule_kernel", _forward, _backward, lambda x, state: empty_like(x.v, state))
