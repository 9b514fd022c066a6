"""States whose accumulators are kept in half precision between the steps of decoding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stateline.layers.state import State, accumulators, map_marked, nbytes


def stored(state: State, dtype: torch.dtype) -> State:
    """The state with its accumulators, and the past inputs of filters, in another dtype.

    Keys, values and positions stay as they are. ``step_`` of every layer computes from such a state
    in float32, and rounds what it writes. The other methods take the state in float32.

    Example:
        >>> from stateline.layers import H3
        >>> from stateline.layers.state import nbytes
        >>> state = H3(4).init_state(1)
        >>> nbytes(stored(state, torch.bfloat16)) / nbytes(state)
        0.5
    """
    return _cast(state, lambda _: dtype)


def stored_bytes(layer: Any, length: int, dtype: torch.dtype | None) -> int:
    """Bytes of one row's state after ``length`` tokens, kept as by :func:`stored`.

    Without a dtype, all tensors keep their own.
    """
    if dtype is None:
        return layer.state_bytes(length)
    begun = layer.init_state(1)  # what is kept in another dtype has the same size at every length
    return layer.state_bytes(length) - nbytes(begun) + nbytes(stored(begun, dtype))


def storable_parts(state: State) -> list[Tensor]:
    """The tensors that :func:`stored` keeps in another dtype."""
    found: list[Tensor] = []

    def note(leaf: Tensor, marked: bool) -> Tensor:
        if marked and leaf.is_floating_point():
            found.append(leaf)
        return leaf

    map_marked(state, _storable, note)
    return found


def widened(state: State) -> State:
    """The state with its storable tensors in float32 at least."""
    return _cast(state, lambda own: torch.promote_types(own, torch.float32))


def _cast(state: State, dtype: Callable[[torch.dtype], torch.dtype]) -> State:
    """Cast what may be stored in another dtype."""

    def change(leaf: Tensor, storable: bool) -> Tensor:
        return leaf.to(dtype(leaf.dtype)) if storable and leaf.is_floating_point() else leaf

    return map_marked(state, _storable, change)


def _storable(part: State) -> tuple[str, ...]:
    return (*accumulators(part), *getattr(part, "storable", tuple)())
