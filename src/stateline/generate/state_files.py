"""An interrupted text on disk, from which another process continues exactly as this one would."""

from pathlib import Path
from typing import NamedTuple

import torch

from stateline.errors import InputError
from stateline.files import regular_file
from stateline.generate.session_state import SessionState, template
from stateline.generate.text import HeldText
from stateline.layers.state import Fingerprint, count_fault, load_state, state_fault
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
    fault = state_fault(kept, empty, rows=1) or _range_fault(kept, model)
    if fault := fault or count_fault(kept.session.model, model):
        raise InputError(f"{path} is damaged: {fault}; save it again")
    return kept


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
