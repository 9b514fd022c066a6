"""Diagonal state space model by state passing, in GPU kernels compiled by Triton."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.diagonal_ssm import MOST_MODES, DiagonalWeights
from stateline.ops.diagonal_ssm.state_passing import (
    Signals,
    finish,
    numbered,
    pass_states,
    planes_first,
    tables,
)
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
    """Pass states from block to block; several readouts of a channel run as separate channels."""
    (log_a, b, c), (length, channels) = weights, u.shape[-2:]
    readouts, modes = len(c) // channels, b.shape[1]
    table, powers = tables(log_a, b, c, None, length)
    into, leap = (t.repeat(readouts, 1, 1, 1) for t in (table.into, table.leap))
    signal = u.reshape(-1, length, channels).mT
    if readouts > 1:
        signal = signal.repeat(1, readouts, 1)
    if state is None:
        first = torch.zeros(len(signal), len(c), *into.shape[1::2], device=u.device)
    else:
        planes = planes_first(state.reshape(-1, *b.shape), into.shape[3])
        first = planes.repeat(1, readouts, 1, 1)
    table, numbers = table._replace(into=into, leap=leap), numbered(starts)
    y, before, tail = pass_states(Signals(signal), table, first, numbers)
    y = y.mT.reshape(*u.shape[:-1], len(c))
    if state is None:
        return y, None
    after = finish(before[:, :channels], tail[:, :channels], length, table.into[:channels], powers)
    return y, after[..., :modes, :].reshape(state.shape).to(state.dtype)


diagonal_ssm_stepper = steps.diagonal_stepper
