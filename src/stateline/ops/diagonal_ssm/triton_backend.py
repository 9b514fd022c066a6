"""Diagonal state space model by state passing, in GPU kernels compiled by Triton."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.stepping import Stepper
from stateline.ops.triton_kernels import launch, steps
from stateline.ops.triton_kernels.state_passing import (
    MOST_MODES,
    Tables,
    finish,
    pass_states,
    planes_first,
    tables,
)


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    if function != "diagonal_ssm_stepper" and inputs[2].shape[1] > MOST_MODES:
        return f"the Triton kernel takes up to {MOST_MODES} modes"
    return launch.can_use(*inputs)


def diagonal_ssm(u: Tensor, log_a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Pass states from the zero state."""
    return _run(u, log_a, b, c, None)[0]


def diagonal_ssm_chunk(
    u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Pass states from a state."""
    channels, modes = b.shape[:2]
    y, before, tail, table = _run(u, log_a, b, c, state)
    after = finish(before[:, :channels], tail[:, :channels], u.shape[-2], table)
    return y, after[..., :modes, :].reshape(state.shape).to(state.dtype)


def diagonal_ssm_stepper(log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Stepper:
    """The recurrence for many inputs, on a state that changes in place."""
    return steps.diagonal_stepper(log_a, b, c, skip)


def _run(
    u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tables]:
    """Outputs; state before the last block and its inputs, with a channel per output; tables."""
    length, channels = u.shape[-2:]
    readouts = len(c) // channels
    table = tables(log_a, b, c, None, length)
    into, leap = (t.repeat(readouts, 1, 1, 1) for t in (table.into, table.leap))
    signal = u.reshape(-1, length, channels).mT
    if readouts > 1:
        signal = signal.repeat(1, readouts, 1)
    if state is None:
        first = torch.zeros(len(signal), len(c), *into.shape[1::2], device=u.device)
    else:
        planes = planes_first(state.reshape(-1, *b.shape), into.shape[3])
        first = planes.repeat(1, readouts, 1, 1)
    y, before, tail = pass_states(signal, table.taps, into, table.out, leap, first)
    return y.mT.reshape(*u.shape[:-1], len(c)), before, tail, table
