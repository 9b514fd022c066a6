"""A cache of keys and values that gets one more token, by PyTorch's functions."""

from torch import Tensor

from stateline.ops.attention import AttentionCache
from stateline.ops.pointwise import rotary
from stateline.ops.positions import rotation


def append(
    q: Tensor, k: Tensor, v: Tensor, cache: AttentionCache, frequency: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a token into the next slots, and return its queries and the whole cache to attend to."""
    slot = cache.length[:, None]
    q, k, v = (x[:, None] for x in (q, k, v))
    if frequency is not None:
        angles = rotation(slot, frequency)
        q, k = rotary(q, *angles), rotary(k, *angles)
    index = slot[..., None, None].expand_as(k)
    for held, new in zip(cache[:2], (k, v), strict=True):
        held.scatter_(1, index, new.to(held.dtype))
    return q, cache.k.to(q.dtype), cache.v.to(q.dtype)
