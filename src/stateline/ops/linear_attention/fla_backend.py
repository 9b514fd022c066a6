"""Linear attention by flash-linear-attention: one decay per head, or one per entry of a key."""

from fla.ops.gla import chunk_gla
from fla.ops.simple_gla import chunk_simple_gla
from torch import Tensor

from stateline.ops import third_party
from stateline.ops.linear_attention import LinearSignals

available = third_party.no_device
can_use = third_party.can_use_fla


def linear_attention(
    x: LinearSignals, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run their kernel: each head has its own query and key."""
    q, k, v, log_decay = x.with_own_keys()
    run = chunk_gla if x.decays_by_entry else chunk_simple_gla
    decay = None if log_decay is None else log_decay.float()
    signals = {"q": q.to(v.dtype), "k": k.to(v.dtype), "v": v, "g": decay}
    return third_party.run_fla(run, state, starts, **signals)
