"""Gated delta rule by flash-linear-attention's ``chunk_gated_delta_rule``."""

from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor

from stateline.ops import third_party

available = third_party.no_device
can_use = third_party.can_use_fla


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
