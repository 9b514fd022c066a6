"""Linear attention by flash-linear-attention: one decay per head, or one per entry of a key."""

from fla.ops.gla import chunk_gla
from fla.ops.simple_gla import chunk_simple_gla
from torch import Tensor

from stateline.ops import third_party

available = third_party.no_device
can_use = third_party.can_use_fla


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run their kernel: queries are not scaled, each head has its own query and key."""
    each = v.shape[2] // q.shape[2]
    if each > 1:
        q, k = (t.repeat_interleave(each, dim=2) for t in (q, k))
    decay = None if log_decay is None else log_decay.float()
    run = chunk_gla if decay is not None and decay.ndim == v.ndim else chunk_simple_gla
    y, after = run(
        q.to(v.dtype),
        k.to(v.dtype),
        v,
        g=decay,
        scale=1.0,
        initial_state=state.float(),
        output_final_state=True,
    )
    return y.to(v.dtype), after.to(state.dtype)
