"""Delta rule with a decay per entry by flash-linear-attention's ``chunk_dplr_delta_rule``."""

from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule
from torch import Tensor

from stateline.ops import third_party

available = third_party.no_device
can_use = third_party.can_use_fla


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
