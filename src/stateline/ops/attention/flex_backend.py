"""Causal attention with windows, linear biases or a soft cap by PyTorch's FlexAttention."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

from stateline.ops import third_party
from stateline.ops.attention import AttentionMask

MASKS = 32
"""Largest number of cached masks: one for each length, tensor of windows and of first slots."""

COMPILED = 256
"""Kernels for fixed shapes that PyTorch compiles before it computes all scores instead."""

SHORTEST = 128
"""Queries per block of FlexAttention's kernel; with fewer queries, other backends run the call."""

_masks: OrderedDict[tuple[Any, ...], tuple[AttentionMask, BlockMask]] = OrderedDict()

available = third_party.no_device


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernel cannot run this call, or an empty string."""
    q, k, v, mask, dropout = inputs
    if mask.start is not None:
        return "FlexAttention is used without start, where one mask serves all rows"
    if mask.plain:
        return "plain causal attention is faster by PyTorch's fused kernel"
    if dropout:
        return "FlexAttention has no dropout"
    return can_take(q, k, v)


def can_take(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why FlexAttention cannot take these queries, keys and values, or an empty string."""
    if q.shape[1] < SHORTEST:
        return f"FlexAttention is used for at least {SHORTEST} queries"
    width = q.shape[-1]
    if width < 16 or width & (width - 1):
        return "FlexAttention takes heads of a power of two of at least 16 entries"
    if torch.compiler.is_compiling():
        return "masks are made outside of compiled code"
    return third_party.can_use(third_party.SINGLE, q, k, v)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float) -> Tensor:  # noqa: ARG001
    """Skip the blocks that no head sees, and add the bias to the scores of the others."""
    seen = _mask(mask, q, k.shape[1])
    return run(q, k, v, _change(mask), seen)


def run(
    q: Tensor, k: Tensor, v: Tensor, change: Callable[..., Tensor] | None, mask: BlockMask
) -> Tensor:
    """Call FlexAttention, with the heads second."""
    heads = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    with torch._dynamo.config.patch(recompile_limit=COMPILED):
        y = _compiled()(*heads, score_mod=change, block_mask=mask, enable_gqa=grouped)
    return y.transpose(1, 2)


@cache
def _compiled() -> Any:
    """PyTorch's function for fixed shapes: with dynamic shapes it is ten times slower."""
    return torch.compile(flex_attention, dynamic=False)


def _change(mask: AttentionMask) -> Callable[..., Tensor] | None:
    """The change of the scores, if there is one."""
    changes = capped(mask.soft_cap)
    if mask.slopes is not None:
        slope = mask.slopes.float()
        changes.append(lambda score, _b, h, i, j: score - slope[h] * (i - j))
    return in_turn(changes)


def capped(soft_cap: float | None) -> list[Callable[..., Tensor]]:
    """The change of the scores by a soft cap, if there is one."""
    return [] if soft_cap is None else [lambda score, *_: soft_cap * (score / soft_cap).tanh()]


def in_turn(changes: Sequence[Callable[..., Tensor]]) -> Callable[..., Tensor] | None:
    """Changes of the scores one after the other; ``None`` if there are none."""
    return reduce(_after, changes) if changes else None


def _after(first: Callable[..., Tensor], second: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Both changes of the scores, in this order."""
    return lambda score, *place: second(first(score, *place), *place)


def _mask(mask: AttentionMask, q: Tensor, slots: int) -> BlockMask:
    """Cached; holding the tensors keeps their addresses from being reused.

    Tensors made in inference mode do not tell whether they have changed: their masks are not kept.
    """
    (batch, length, heads), windows, first = q.shape[:3], mask.windows, mask.first
    parts = windows, first
    sizes = None if first is None else batch, None if windows is None else heads, length, slots
    make = partial(create_block_mask, _seen(windows, first), *sizes, device=str(q.device))
    if any(part is not None and part.is_inference() for part in parts):
        return make()
    places = [None if part is None else (part.data_ptr(), part._version) for part in parts]
    key = *places, length, slots, q.device, heads
    if key not in _masks:
        with torch.inference_mode(False):  # gradients may need it later
            _masks[key] = mask, make()
    _masks.move_to_end(key)
    if len(_masks) > MASKS:
        _masks.popitem(last=False)
    return _masks[key][1]


def _seen(windows: Tensor | None, first: Tensor | None) -> Callable[..., Tensor]:
    """Whether a query sees a slot."""
    rules: list[Callable[..., Tensor]] = [lambda _b, _h, i, j: i >= j]
    if windows is not None:
        rules.append(lambda _b, h, i, j: i - j < windows[h])
    if first is not None:
        rules.append(lambda b, _h, i, j: j >= first[b, i])
    return and_masks(*rules)
