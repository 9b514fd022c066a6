"""Delta rule with a decay per entry by flash-linear-attention's ``chunk_dplr_delta_rule``."""

from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule
from torch import Tensor

from stateline.ops import third_party
from stateline.ops.delta_rule import DeltaSignals

available = third_party.no_device
can_use = third_party.can_use_fla


def delta_rule(
    x: DeltaSignals, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the kernel."""
    signals = {name: getattr(x, name).to(x.v.dtype) for name in "qkvab"}
    gates = {"gk": x.log_decay.float()}
    return third_party.run_fla(chunk_dplr_delta_rule, state, starts, **signals, **gates)
