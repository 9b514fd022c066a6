"""Ops with all tensors as positional arguments, for tests that differentiate each of them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from stateline import ops
from stateline.ops import DiagonalWeights, DPLRWeights, H3CoreState, H3Weights, MIMOWeights


def diagonal_ssm(u: Tensor, *weights: Tensor, **options: Any) -> Tensor:
    return ops.diagonal_ssm(u, DiagonalWeights(*weights), **options)[0]


def diagonal_ssm_chunk(u: Tensor, *inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.diagonal_ssm(u, DiagonalWeights(*inputs[:3]), inputs[3], **options)


def diagonal_ssm_every(u: Tensor, *inputs: Any, **options: Any) -> Tensor:
    return ops.diagonal_ssm_every(u, DiagonalWeights(*inputs[:3]), inputs[3], **options)


def diagonal_ssm_step(u: Tensor, *inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.diagonal_ssm_step(u, DiagonalWeights(*inputs[:3]), inputs[3], **options)


def diagonal_ssm_stepper(*weights: Tensor, **options: Any) -> Any:
    return ops.diagonal_ssm_stepper(DiagonalWeights(*weights[:3]), weights[3], **options)


def dplr_ssm(u: Tensor, *weights: Tensor, **options: Any) -> Tensor:
    return ops.dplr_ssm(u, DPLRWeights(*weights), **options)[0]


def dplr_ssm_chunk(u: Tensor, *inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.dplr_ssm(u, DPLRWeights(*inputs[:5]), inputs[5], **options)


def dplr_ssm_every(u: Tensor, *inputs: Any, **options: Any) -> Tensor:
    return ops.dplr_ssm_every(u, DPLRWeights(*inputs[:5]), inputs[5], **options)


def dplr_ssm_step(u: Tensor, *inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.dplr_ssm_step(u, DPLRWeights(*inputs[:5]), inputs[5], **options)


def mimo_ssm(u: Tensor, *weights: Tensor, **options: Any) -> Tensor:
    return ops.mimo_ssm(u, MIMOWeights(*weights), **options)[0]


def mimo_ssm_chunk(u: Tensor, *inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.mimo_ssm(u, MIMOWeights(*inputs[:3]), inputs[3], **options)


def mimo_ssm_step(u: Tensor, *inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.mimo_ssm_step(u, MIMOWeights(*inputs[:3]), inputs[3], **options)


def _core(taps: Tensor, log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> H3Weights:
    return H3Weights(taps, DiagonalWeights(log_a, b, c), skip)


def h3_core(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor, **options: Any) -> Tensor:
    return ops.h3_core(q, k, v, _core(*weights), **options)[0]


def h3_core_chunk(
    q: Tensor, k: Tensor, v: Tensor, *inputs: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    state = H3CoreState(*inputs[5:])
    y, after = ops.h3_core(q, k, v, _core(*inputs[:5]), state, **options)
    return y, *after


def h3_core_step(
    q: Tensor, k: Tensor, v: Tensor, *inputs: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    state = H3CoreState(*inputs[5:])
    y, after = ops.h3_core_step(q, k, v, _core(*inputs[:5]), state, **options)
    return y, *after


def h3_core_stepper(*weights: Tensor, **options: Any) -> Any:
    step = ops.h3_core_stepper(_core(*weights), **options)
    return lambda q, k, v, *state: step(q, k, v, H3CoreState(*state))


def _recurrence(name: str, kind: Any) -> Callable[..., Any]:
    """A recurrence, or a step of it: signals, other inputs, and the state."""
    count = len(kind._fields)

    def run(*inputs: Any, **options: Any) -> Any:
        return getattr(ops, name)(kind(*inputs[:count]), *inputs[count:], **options)

    return run


delta_rule = _recurrence("delta_rule", ops.DeltaSignals)
delta_rule_step = _recurrence("delta_rule_step", ops.DeltaSignals)
delta_rule_step_ = _recurrence("delta_rule_step_", ops.DeltaSignals)
gated_delta_rule = _recurrence("gated_delta_rule", ops.GatedDeltaSignals)
gated_delta_rule_step = _recurrence("gated_delta_rule_step", ops.GatedDeltaSignals)
gated_delta_rule_step_ = _recurrence("gated_delta_rule_step_", ops.GatedDeltaSignals)
linear_attention = _recurrence("linear_attention", ops.LinearSignals)
linear_attention_step = _recurrence("linear_attention_step", ops.LinearSignals)
linear_attention_step_ = _recurrence("linear_attention_step_", ops.LinearSignals)


def _scan(name: str) -> Callable[..., Any]:
    """A selective scan or a step of it: u, dt, A, B, C and the state."""

    def run(
        u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *state: Any, **given: Any
    ) -> Any:
        return getattr(ops, name)(ops.ScanSignals(u, dt, b, c), a, *state, **given)

    return run


selective_scan = _scan("selective_scan")
selective_scan_step = _scan("selective_scan_step")
selective_scan_step_ = _scan("selective_scan_step_")
