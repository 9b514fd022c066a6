"""The core of H3 in one pass over its signals, in GPU kernels compiled by Triton."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.stepping import Stepper
from stateline.ops.triton_kernels import launch, steps
from stateline.ops.triton_kernels.state_passing import (
    MOST_MODES,
    finish,
    pass_gated_states,
    planes_first,
    tables,
)

MOST_TAPS = 129
"""Most taps of the keys' filter, whose matrices are computed again for every block."""


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    if function == "h3_core_stepper":
        weights, _, b, c, _ = inputs
        width, taps = weights.shape[1], 0
    else:
        weights, b, c = inputs[3], inputs[5], inputs[6]
        width, taps = weights.shape
    if len(b) != width or len(c) != width:
        return "the Triton kernel takes heads of one channel and one output"
    if taps > MOST_TAPS:
        return f"the Triton kernel takes filters of up to {MOST_TAPS} taps"
    if taps and b.shape[1] > MOST_MODES:
        return f"the Triton kernel takes up to {MOST_MODES} modes"
    return launch.can_use(*inputs[:8], *inputs[9:])  # a filter of one tap has no past


def h3_core(
    q: Tensor, k: Tensor, v: Tensor, taps: Tensor, log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor
) -> Tensor:
    """All in one pass, from zero states."""
    table = tables(log_a, b, c, skip, q.shape[1])
    past = q.new_zeros(len(q), q.shape[2], taps.shape[1] - 1, dtype=torch.float32)
    first = past.new_zeros(len(q), q.shape[2], *table.into.shape[1::2])
    signals, weights = (x.mT for x in (q, k, v)), taps.float().contiguous()
    return pass_gated_states(*signals, past, weights, *table[:4], first)[0].mT


def h3_core_chunk(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    taps: Tensor,
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    past: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same from states."""
    table = tables(log_a, b, c, skip, q.shape[1])
    signals = (x.mT for x in (q, k, v))
    keys, first = past.mT.float().contiguous(), planes_first(state[:, 0, 0], table.into.shape[3])
    y, before, tail, latest = pass_gated_states(
        *signals, keys, taps.float().contiguous(), *table[:4], first
    )
    after = finish(before, tail, q.shape[1], table)[..., : b.shape[1], :]
    return y.mT, latest.mT.to(past.dtype), after[:, None, None].to(state.dtype)


def h3_core_stepper(weights: Tensor, log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Stepper:
    """The same for many tokens, on states that change in place."""
    return steps.h3_stepper(weights, log_a, b, c, skip)
