"""Linear attention by flash-linear-attention: one decay per head, or one per entry of a key."""

from fla.ops.gla import chunk_gla
from fla.ops.simple_gla import chunk_simple_gla
from torch import Tensor

from stateline.ops import third_party

available = third_party.no_device
can_use = third_party.can_use_fla


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run their kernel: each head has its own query and key."""
    each = v.shape[2] // q.shape[2]
    if each > 1:
        q, k = (t.repeat_interleave(each, dim=2) for t in (q, k))
    decay = None if log_decay is None else log_decay.float()
    run = chunk_gla if decay is not None and decay.ndim == v.ndim else chunk_simple_gla
    signals = {"q": q.to(v.dtype), "k": k.to(v.dtype), "v": v, "g": decay}
    return third_party.run_fla(run, state, starts, **signals)
