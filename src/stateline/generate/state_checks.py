"""Checks of a state that was read from a file, before a model is given it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def state_fault(state: Any, template: Callable[[int], Any], *, rows: int) -> str:
    """The first fault of a state's tensors, in words; empty if there is none.

    Dtypes and numbers of axes must equal the model's own states', and so must be the sizes of
    all axes that do not grow. No number may be NaN, and no counter negative.

    Args:
        state: The state.
        template: Returns a state of one row with room for the given number of steps.
        rows: Number of rows that the state must have.
    """
    small, large = pytree.tree_leaves(template(0)), pytree.tree_leaves(template(1))
    named = pytree.tree_flatten_with_path(state)[0]
    if len(named) != len(small):
        return f"it has {len(named)} tensors, not {len(small)}"
    for (path, leaf), least, roomy in zip(named, small, large, strict=True):
        if fault := _leaf_fault(leaf, least, roomy, rows):
            return f"its {pytree.keystr(path)} {fault}"
    return ""


def _leaf_fault(leaf: Tensor, least: Tensor, roomy: Tensor, rows: int) -> str:
    if leaf.dtype != least.dtype:
        return f"is {leaf.dtype}, not {least.dtype}"
    fixed = [axis for axis in range(1, least.ndim) if least.shape[axis] == roomy.shape[axis]]
    wanted = (rows, *least.shape[1:])
    if leaf.ndim != least.ndim or any(leaf.shape[axis] != wanted[axis] for axis in (0, *fixed)):
        return f"has the shape {tuple(leaf.shape)}, not {wanted}"
    if leaf.is_floating_point():
        return "holds NaN" if leaf.isnan().any() else ""
    return "is negative" if leaf.dtype.is_signed and leaf.numel() and leaf.min() < 0 else ""
