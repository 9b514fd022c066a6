"""Parts of a joint projection whose gradients are joined without a copy."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from stateline.ops.dispatch import wants_gradient


def parts_of(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of a tensor, cut along the last axis, as ``Tensor.split`` makes them.

    Gradients that lie :func:`side_by_side` in one tensor are joined as they are.

    Example:
        >>> [part.tolist() for part in parts_of(torch.arange(3), [1, 2])]
        [[0], [1, 2]]
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or not wants_gradient(x):
        # a third of the time of Tensor.split, which is a function of Python
        return x.split_with_sizes(list(sizes), dim=-1)
    parts: tuple[Tensor, ...] = _Parts.apply(x, sizes)
    return parts


class Room(NamedTuple):
    """Memory for the gradient of a part.

    Attributes:
        tensor: Of the shape of the part.
        array: Its entries from the first on; between tokens, those of other parts.
        stride: Entries from token to token.
    """

    tensor: Tensor
    array: NDArray[Any]
    stride: int


def side_by_side(dtype: torch.dtype, *parts: Tensor) -> list[Room]:
    """Room for parts (batch, length, ...): in one tensor, if they have the same tokens."""
    widths = [part.shape[2:].numel() for part in parts]
    if any(part.shape[:2] != parts[0].shape[:2] for part in parts):
        alone = [part.new_empty(part.shape, dtype=dtype) for part in parts]
        return [Room(x, x.numpy().reshape(-1), n) for x, n in zip(alone, widths, strict=True)]
    whole = parts[0].new_empty(*parts[0].shape[:2], sum(widths), dtype=dtype)
    entries, rooms, place = whole.numpy().reshape(-1), [], 0
    for part, width in zip(parts, widths, strict=True):
        view = whole[..., place : place + width].unflatten(-1, part.shape[2:])
        rooms.append(Room(view, entries[place:], sum(widths)))
        place += width
    return rooms


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int]) -> Any:
        ctx.sizes = sizes
        return x.split_with_sizes(list(sizes), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        first, width = grads[0], sum(ctx.sizes)
        shape = (*first.shape[:-1], width)
        strides = torch.empty(shape, device="meta").stride()
        place, memory = first.storage_offset(), first.untyped_storage().data_ptr()
        for grad, size in zip(grads, ctx.sizes, strict=True):
            same = grad.untyped_storage().data_ptr() == memory and grad.dtype is first.dtype
            if not same or grad.stride() != strides or grad.storage_offset() != place:
                return torch.cat(grads, dim=-1), None
            place += size
        return first.as_strided(shape, strides), None
