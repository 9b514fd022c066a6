"""Gated delta rule by flash-linear-attention's ``chunk_gated_delta_rule``."""

from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor

from stateline.ops import third_party
from stateline.ops.gated_delta_rule import GatedDeltaSignals

available = third_party.no_device
can_use = third_party.can_use_fla


def gated_delta_rule(
    x: GatedDeltaSignals, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the kernel on keys that are normalised already."""
    signals = {"q": x.q.to(x.v.dtype), "k": x.k.to(x.v.dtype), "v": x.v}
    gates = {"g": x.log_decay.float(), "beta": x.beta.float()}
    return third_party.run_fla(chunk_gated_delta_rule, state, starts, **signals, **gates)
