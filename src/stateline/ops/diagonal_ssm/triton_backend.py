"""Diagonal state space model by state passing, in GPU kernels compiled by Triton."""

from typing import Any

from torch import Tensor

from stateline.ops.diagonal_ssm import MOST_MODES, DiagonalWeights
from stateline.ops.diagonal_ssm.state_passing import Signals, pass_states
from stateline.ops.triton_common import launch, steps


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    weights = inputs[0 if function == "diagonal_ssm_stepper" else 1]
    if function != "diagonal_ssm_stepper" and weights.b.shape[1] > MOST_MODES:
        return f"the Triton kernel takes up to {MOST_MODES} modes"
    return launch.can_use(*inputs)


def diagonal_ssm(
    u: Tensor, weights: DiagonalWeights, state: Tensor | None, starts: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Pass states from block to block."""
    signal = u.reshape(-1, *u.shape[-2:]).mT
    first = None if state is None else state.reshape(-1, *weights.b.shape)
    y, after = pass_states(Signals(signal), weights, None, first, starts)
    y = y.mT.reshape(*u.shape[:-1], len(weights.c))
    return y, None if state is None else after.reshape(state.shape)


diagonal_ssm_stepper = steps.diagonal_stepper
