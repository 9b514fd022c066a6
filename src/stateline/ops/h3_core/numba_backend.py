"""One token through the core of H3 by one kernel, compiled by numba for the CPU.

Whole sequences are composed of other ops: fusing their kernels gained less than 1.1x.
"""

import torch
from torch import Tensor

from stateline.ops.diagonal_ssm.step_kernel import rows_of, transitions
from stateline.ops.h3_core import H3CoreState, H3Weights
from stateline.ops.h3_core.step_kernel import h3_advance
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import Changing, array, fan_out, of_token, output
from stateline.ops.stepping import Stepper

can_use = launch.can_run


def h3_core_step(
    q: Tensor, k: Tensor, v: Tensor, weights: H3Weights, state: H3CoreState
) -> tuple[Tensor, H3CoreState]:
    """One token, on a copy of the state."""
    after = H3CoreState(*(x.clone(memory_format=torch.contiguous_format) for x in state))
    return h3_core_stepper(weights)(q, k, v, after), after


def h3_core_stepper(weights: H3Weights) -> Stepper:
    """The same for many tokens, on states that change in place."""
    taps, (log_a, b, c), skip = weights
    dtype = launch.working_dtype(taps, log_a, b, c, skip)
    vectors = transitions(log_a, dtype), *rows_of(dtype, b, c), array(skip, dtype)
    constants = array(taps.flip(-1).mT, dtype), *vectors
    heads, outputs = len(b), len(c) // len(b)

    def step(q: Tensor, k: Tensor, v: Tensor, state: H3CoreState) -> Tensor:
        y, read = output((len(q), outputs * q.shape[1]), dtype)
        work = (state.h.numel() + state.past.numel()) / 2
        with Changing(dtype, *state) as (keys, x):
            signals = of_token(q, dtype), of_token(k, dtype), of_token(v, dtype)
            places = keys, x.reshape(*x.shape[:4], -1), read
            fan_out(h3_advance, (*signals, *constants, *places), heads, work)
        return y.to(q.dtype)

    return step
