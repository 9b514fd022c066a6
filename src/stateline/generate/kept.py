"""A conversation on disk: another process goes on with it exactly as this one would have."""

from pathlib import Path
from typing import NamedTuple

import torch

from stateline.generate.session import SessionState, blank
from stateline.generate.text import HeldText
from stateline.layers.state import load_state, save_state
from stateline.models.language_model import LanguageModel


class Kept(NamedTuple):
    """A text that was interrupted: what the model needs to go on, and what the reader does."""

    session: SessionState
    text: HeldText


def save_kept(path: str | Path, kept: Kept, model: LanguageModel) -> None:
    """Write an interrupted text, with the fingerprint of the model that was at it.

    Raises:
        InputError: If the file cannot be written.
    """
    save_state(path, kept, model)


def load_kept(path: str | Path, model: LanguageModel, *, force: bool = False) -> Kept:
    """Read what :func:`save_kept` wrote.

    Args:
        path: File to read.
        model: The model that goes on.
        force: Accept the text of another model of the same shape.

    Returns:
        The interrupted text.

    Raises:
        InputError: If the file is missing, damaged, something else, or of another model.
    """

    def template(capacity: int) -> Kept:
        nothing = torch.zeros(1, capacity, dtype=torch.int64)
        return Kept(blank(model, capacity), HeldText(nothing, nothing))

    kept: Kept = load_state(path, model, force=force, template=template)
    return kept
