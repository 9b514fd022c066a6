"""An interrupted text on disk, from which another process continues exactly as this one would."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.files import regular_file
from stateline.generate.session import SessionState, template
from stateline.generate.text import HeldText
from stateline.layers.state import Fingerprint, load_state
from stateline.models.language_model import LanguageModel


class Kept(NamedTuple):
    """An interrupted text: the state of the model, and of the conversion to text.

    :func:`stateline.save_state` writes it like any other state.
    """

    session: SessionState
    text: HeldText


def load_kept(
    path: str | Path, model: LanguageModel, *, force: bool = False, known: Fingerprint | None = None
) -> Kept:
    """Read an interrupted text that was saved, onto the model's device.

    Args:
        path: File to read.
        model: The model that continues the text.
        force: Accept the text of another model of the same shape.
        known: The fingerprint of the model, if it was computed before.

    Raises:
        InputError: If the file is missing, damaged, not an interrupted text, or of another model.
    """
    regular_file(path, "state file")

    def empty(capacity: int) -> Kept:
        nothing = torch.zeros(1, capacity, dtype=torch.int64)
        return Kept(template(model, capacity), HeldText(nothing, nothing))

    kept: Kept = load_state(path, model, force=force, template=empty, known=known)
    if fault := state_fault(kept, empty, rows=1) or _range_fault(kept, model):
        raise InputError(f"{path} is damaged: {fault}; save it again")
    return kept


def state_fault(state: Any, template: Callable[[int], Any], *, rows: int) -> str:
    """The first fault of a state that was read from a file, in words; empty if there is none.

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


def _range_fault(kept: Kept, model: LanguageModel) -> str:
    """The value that is out of range, in words; empty if none is."""
    limits = [
        ("token", kept.session.token, model.config.vocab_size),
        ("held text", kept.text.text, 256),
    ]
    if model.max_len is not None:
        limits.append(("position", kept.session.model.position, model.max_len + 1))
    for name, values, end in limits:
        if values.numel() and int(values.max()) >= end:
            return f"its {name} must be below {end}, got {int(values.max())}"
    return ""
