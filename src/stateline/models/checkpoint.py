"""A model on disk: ``config.json`` beside ``model.safetensors``."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stateline.errors import InputError
from stateline.files import write_atomically, write_text
from stateline.models.classifier import ClassifierConfig, SequenceClassifier
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.make import AnyModel, make_model

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_model(
    model: AnyModel, folder: str | Path, *, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model into a folder, each file atomically.

    Args:
        model: The model.
        folder: Where its two files shall lie.
        weights: Its parameters and buffers, where the model itself has only a share of them.

    Raises:
        InputError: If the folder cannot be written to.
    """
    named = model.state_dict() if weights is None else weights
    tensors = {name: tensor.detach().contiguous() for name, tensor in named.items()}
    write_atomically(Path(folder) / WEIGHTS, lambda file: save_file(tensors, file))
    write_text(Path(folder) / CONFIG, model.config.to_json())


def load_model(folder: str | Path, *, device: torch.device | str = "cpu") -> LanguageModel:
    """Read a language model written by :func:`save_model`.

    Args:
        folder: Where it lies.
        device: Where its weights shall be.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: If a file is missing or damaged, the weights are of another configuration, or
            the model is a classifier.
    """
    model = _load(folder, device)
    if not isinstance(model, LanguageModel):
        raise InputError(
            f"the model in {folder} is a classifier, which knows classes and no next token: read "
            "it with load_classifier, or give the folder of a language model"
        )
    return model


def load_classifier(
    folder: str | Path, *, device: torch.device | str = "cpu"
) -> SequenceClassifier:
    """Read a classifier written by :func:`save_model`; the rest is as in :func:`load_model`."""
    model = _load(folder, device)
    if not isinstance(model, SequenceClassifier):
        raise InputError(
            f"the model in {folder} is a language model: read it with load_model, or give the "
            "folder of a classifier"
        )
    return model


def _load(folder: str | Path, device: torch.device | str) -> AnyModel:
    config_file, weights_file = Path(folder) / CONFIG, Path(folder) / WEIGHTS
    for file in (config_file, weights_file):
        if not file.is_file():
            raise InputError(f"no model in {folder}: {file.name} is missing")
    try:
        text = config_file.read_text(encoding="utf-8")
        kind = ClassifierConfig if '"n_classes"' in text else ModelConfig
        model = make_model(kind.from_json(text))
        tensors = load_file(weights_file, device=str(device))
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"the model in {folder} is damaged: {error}; save or train it again"
        ) from error
    wanted, found = _shapes(model.state_dict()), _shapes(tensors)
    if wanted != found:
        differing = sorted(set(wanted.items()) ^ set(found.items()))
        raise InputError(
            f"the weights in {folder} do not fit its {CONFIG}: they differ in {differing[0][0]!r}; "
            "the two files must come from one model"
        )
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise InputError(
                f"the weights in {folder} are not all finite numbers, see {name!r}: take an older "
                "checkpoint, or train again with a lower lr"
            )
    aligned = {name: tensor.clone() for name, tensor in tensors.items()}
    model.load_state_dict(aligned, assign=True)  # in the precision in which they were saved
    return model.to(device).eval()


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[bool, torch.Size]]:
    """What must be the same of every tensor: whether it is a fraction, and its shape."""
    return {name: (t.is_floating_point(), t.shape) for name, t in tensors.items()}
