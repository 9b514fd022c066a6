"""The core of H3 in one pass over its signals, in GPU kernels compiled by Triton."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.convolution import slide
from stateline.ops.diagonal_ssm import MOST_MODES
from stateline.ops.diagonal_ssm.state_passing import Signals, pass_states
from stateline.ops.h3_core import H3CoreState, H3Weights
from stateline.ops.triton_common import launch, steps

MOST_TAPS = 129
"""Most taps of the keys' filter; every block computes the filter's matrices again."""


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    stepper = function == "h3_core_stepper"
    weights: H3Weights = inputs[0 if stepper else 3]
    (width, taps), diagonal = weights.taps.shape, weights.diagonal
    if len(diagonal.b) != width or len(diagonal.c) != width:
        return "the Triton kernel takes heads of one channel and one output"
    if not stepper and taps > MOST_TAPS:
        return f"the Triton kernel takes filters of up to {MOST_TAPS} taps"
    if not stepper and diagonal.b.shape[1] > MOST_MODES:
        return f"the Triton kernel takes up to {MOST_MODES} modes"
    if stepper or inputs[4] is None:
        return launch.can_use(*inputs)
    return launch.can_use(*inputs[:4], inputs[4].h, *inputs[5:])  # a filter of one tap has no past


def h3_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: H3Weights,
    state: H3CoreState | None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Filter, gates and diagonal SSM in one pass."""
    taps, diagonal, skip = weights
    if state is None:
        keys = q.new_zeros(len(q), q.shape[2], taps.shape[1] - 1, dtype=torch.float32)
    else:
        k = k.float()  # its gradient is the sum of two, of which neither is rounded
        keys = state.past.mT.float().contiguous()
    signals = Signals(v.mT, q.mT, k.mT, keys, taps.float().contiguous())
    h = None if state is None else state.h[:, 0, 0]
    y, h = pass_states(signals, diagonal, skip, h, starts)
    if state is None:
        return y.mT, None
    return y.mT, H3CoreState(slide(state.past, k, starts), h[:, None, None])


h3_core_stepper = steps.h3_stepper
