"""Gated delta rule by flash-linear-attention's ``chunk_gated_delta_rule``."""

from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor

from stateline.ops import third_party

available = third_party.no_device
can_use = third_party.can_use_fla


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run their kernel: keys have been normalised."""
    signals = {"q": q.to(v.dtype), "k": k.to(v.dtype), "v": v}
    gates = {"g": log_decay.float(), "beta": beta.float()}
    return third_party.run_fla(chunk_gated_delta_rule, state, starts, **signals, **gates)
