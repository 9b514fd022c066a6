"""Gated delta rule by flash-linear-attention's ``chunk_gated_delta_rule``."""

from typing import Any

from fla.ops.gated_delta_rule import chunk_gated_delta_rule
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


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run their kernel: queries are not scaled, keys have been normalised."""
    y, after = chunk_gated_delta_rule(
        q.to(v.dtype),
        k.to(v.dtype),
        v,
        g=log_decay.float(),
        beta=beta.float(),
        scale=1.0,
        initial_state=state.float(),
        output_final_state=True,
    )
    return y.to(v.dtype), after.to(state.dtype)
