"""Delta rule with a decay per entry by flash-linear-attention's ``chunk_dplr_delta_rule``."""

from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule
from torch import Tensor

from stateline.ops import third_party

available = third_party.no_device
can_use = third_party.can_use_fla


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run their kernel."""
    signals = {name: x.to(v.dtype) for name, x in {"q": q, "k": k, "a": a, "b": b}.items()}
    signals |= {"v": v, "gk": log_decay.float()}
    return third_party.run_fla(chunk_dplr_delta_rule, state, starts, **signals)
