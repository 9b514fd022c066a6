"""Gated delta rule as a delta rule, in kernels compiled by numba for the CPU."""

import math
from typing import Any

from torch import Tensor

from stateline.ops.delta_rule.numba_backend import (
    STEP,
    Corrections,
    cropped,
    dots,
    gradients,
    padded,
    scan,
)
from stateline.ops.dispatch import wants_gradient
from stateline.ops.gated_delta_rule import GatedDeltaSignals
from stateline.ops.gated_delta_rule.numba_kernel import gated_delta_step
from stateline.ops.kernel_op import KernelOp, empty_like
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.vector import LANES

WIDEST = math.inf if LANES == 16 else 128
"""Largest width of keys and values at which gradients are faster than with PyTorch's products.

With AVX-512, they are faster with wider heads, too (measured on one processor).
"""


can_use = launch.can_run


def gains(function: str, *inputs: Any) -> bool:  # noqa: ARG001
    """Whether a call is faster here: always, except for some gradients of wide heads."""
    x: GatedDeltaSignals = inputs[0]
    return not wants_gradient(*inputs) or max(x.k.shape[-1], x.v.shape[-1]) <= WIDEST


def gated_delta_rule(
    x: GatedDeltaSignals, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence."""
    return _whole(x.reset(starts), state)


def gated_delta_rule_step_(x: GatedDeltaSignals, state: Tensor) -> Tensor:
    """The recurrence, once, on a state that changes in place."""
    return launch.step_in_place(gated_delta_step, x, state, x.v, STEP)


def _forward(x: GatedDeltaSignals, state: Tensor) -> tuple[Tensor, Tensor]:
    decay, start, q, k, v = padded(x.log_decay, state, x.q, x.k, x.v)
    written, y, after = empty_like(v, v, start)
    beta = x.beta.to(v.dtype)[..., None]
    signals = (-beta * decay * k, q, k, None, v, beta)
    scan(signals, decay, start, (written, y, after))
    return cropped(y.mul_(decay).addcmul_(dots(q, k), written), after, x.v, state)


def _backward(grad: Tensor, grad_after: Tensor, x: GatedDeltaSignals, state: Tensor) -> Any:
    """Gradients of the delta rule that reads at -decay k and writes at beta k."""
    decay, start, q, k, v = padded(x.log_decay, state, x.q, x.k, x.v)
    beta = x.beta.to(v.dtype)[..., None]
    signals = Corrections(q, None, v, decay, -decay * k, beta * k)
    found, dstart = gradients(grad, grad_after, signals, start)
    dlog = found.decay + dots(signals.a, found.a)
    (keys, values), dk = state.shape[2:], beta * found.b - decay * found.a
    of_x = found.q[..., :keys], dk[..., :keys], found.v[..., :values], dlog, dots(k, found.b)
    return of_x, dstart[:, :, :keys, :values]


_whole = KernelOp(
    "gated_delta_rule_kernel", _forward, _backward, lambda x, state: empty_like(x.v, state)
)
