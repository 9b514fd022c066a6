"""Delta rule with a decay per entry by flash-linear-attention's ``chunk_dplr_delta_rule``."""

from typing import Any

from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule
from torch import Tensor

from stateline.ops import third_party

MOST_WIDE = 256
"""Largest key and value of a head that their kernels take."""

available = third_party.no_device


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernel cannot run this call, or an empty string.

    Their kernels multiply float32 as TF32, so that only half precision keeps our promise.
    """
    q, k, v = inputs[:3]
    if max(q.shape[-1], v.shape[-1]) > MOST_WIDE:
        return f"flash-linear-attention takes heads of up to {MOST_WIDE} entries"
    return third_party.can_use(third_party.HALVES, q, k, v)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run their kernel: queries are not scaled."""
    q, k, a, b = (x.to(v.dtype) for x in (q, k, a, b))
    y, after = chunk_dplr_delta_rule(
        q,
        k,
        v,
        a,
        b,
        log_decay.float(),
        scale=1.0,
        initial_state=state.float(),
        output_final_state=True,
    )
    return y.to(v.dtype), after.to(state.dtype)
