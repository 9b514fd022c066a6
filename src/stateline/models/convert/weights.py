"""Folders of published models: their settings and tensors, and how these get into ours."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stateline.errors import InputError
from stateline.layers.base import LOW_PRECISION
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

FILES = ("model.safetensors", "pytorch_model.bin")
"""Where the weights lie: alone, or in several files that an index (``.index.json``) names."""


_UNREADABLE = (
    SafetensorError,
    UnpicklingError,
    OSError,
    RuntimeError,
    EOFError,
    LookupError,  # this and the next: what is no pickle at all, a page of text, say
    ValueError,
    TypeError,
)
"""What reading weights from a damaged file may raise."""


def read_settings(folder: str | Path) -> dict[str, Any]:
    """The settings beside published weights.

    Args:
        folder: With a ``config.json``.

    Returns:
        What is in it.

    Raises:
        InputError: If it is missing, or not a JSON object.
    """
    return _read_json(Path(folder) / "config.json")


def count(settings: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A size or a number of layers or heads, which must be among the settings or have a default.

    Raises:
        InputError: If it is missing, or not a whole number of at least 1.
    """
    value = settings.get(name, default)
    if type(value) is not int or value < 1:
        raise InputError(
            f"the published configuration must have {name!r}, a whole number of at least 1, got "
            f"{value!r}: is it of another family?"
        )
    return value


def number(settings: Mapping[str, Any], name: str, default: float) -> float:
    """A number among the settings, or its default.

    Raises:
        InputError: If it is something else.
    """
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(
            f"the published configuration wants {name!r} to be a number, got {value!r}"
        )
    return float(value)


def section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A group of settings; empty where it is missing or null.

    Raises:
        InputError: If it is something else.
    """
    value = settings.get(name) or {}
    if not isinstance(value, Mapping):
        raise InputError(
            f"the published configuration wants {name!r} to be an object, got {value!r}"
        )
    return value


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """The tensors of a published model, by their official names.

    Pickled files are read as tensors only: no code in them is run.

    Args:
        folder: With ``model.safetensors`` or ``pytorch_model.bin``, or several of either and their
            index.

    Returns:
        The tensors, on the processor, as they were saved.

    Raises:
        InputError: If there are none, or they cannot be read.
    """
    for name in FILES:
        path, index = Path(folder) / name, Path(folder) / f"{name}.index.json"
        if path.is_file():
            return read_tensors(path)
        if index.is_file():
            # Of what the index says only the file name counts: it cannot point to another folder.
            places = section(_read_json(index), "weight_map").values()
            parts = {Path(str(place)).name for place in places}
            files = [read_tensors(path.with_name(part)) for part in sorted(parts)]
            return {name: tensor for tensors in files for name, tensor in tensors.items()}
    raise InputError(f"no weights in {folder}: it must hold {' or '.join(FILES)}")


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of one file, by their names.

    Args:
        path: A safetensors file, or a pickled one, of which only tensors are read; if it is a
            checkpoint of PyTorch Lightning, those of its model.

    Returns:
        The tensors, on the processor, as they were saved.

    Raises:
        InputError: If the file cannot be read, or holds something else.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, UnpicklingError):  # PyTorch's words would have code in the file run
            reason = "it is damaged, or holds more than tensors"
        raise InputError(f"cannot read the weights in {path}: {reason}; get them again") from error
    if isinstance(tensors, dict) and "pytorch-lightning_version" in tensors:
        state = tensors.get("state_dict", {})
        tensors = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise InputError(f"{path} does not hold tensors by name")
    return tensors


def rename(
    tensors: Mapping[str, Tensor], names: Mapping[str, str], *, ignored: str = r"(?!)"
) -> dict[str, Tensor]:
    """The same tensors by our names.

    Args:
        tensors: By official names.
        names: Our name of each official one.
        ignored: Regular expression of official names that hold nothing learned.

    Returns:
        As many tensors as there are names.

    Raises:
        InputError: If tensors are missing, or there are some that nobody knows.
    """
    found = {name for name in tensors if not re.search(ignored, name)}
    if missing := sorted(set(names) - found):
        raise InputError(f"the published weights lack {_some(missing)}: do they fit their config?")
    if unexpected := sorted(found - set(names)):
        raise InputError(
            f"the published weights hold {_some(unexpected)}, for which the model has no place: "
            "do they fit their config?"
        )
    return {ours: tensors[official] for official, ours in names.items()}


def assemble(
    config: ModelConfig, tensors: Mapping[str, Tensor], *, device: torch.device | str = "cpu"
) -> LanguageModel:
    """A model with these weights, in the precision in which they come.

    Of parameters that stay float32 (``keeps_float32``), it is at least that.

    Args:
        config: What the model is made of.
        tensors: All its parameters, by our names.
        device: Where they shall be.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: If a tensor has another shape than the configuration gives it, or is missing.
    """
    model = LanguageModel(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted.get(name):
            raise InputError(
                f"the published weights do not fit their config: {name!r} wants the shape "
                f"{wanted.get(name)}, got {tuple(tensor.shape)}"
            )
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise InputError(
            f"the configuration asks for {_some(missing)}, which the published weights do not have"
        )
    kept = {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        if getattr(module, "keeps_float32", False)
        for name, _ in module.named_parameters(recurse=False)
    }
    aligned = {
        name: (tensor.float() if name in kept and tensor.dtype in LOW_PRECISION else tensor).clone(
            memory_format=torch.contiguous_format
        )
        for name, tensor in tensors.items()
    }
    model.load_state_dict(aligned, assign=True)
    return model.to(device).eval()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"no model in {path.parent}: {path.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: {error}; get it again") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold a JSON object, got a {type(values).__name__}")
    return values


def _some(names: Iterable[str]) -> str:
    """The first few of many names."""
    first, *rest = names
    return f"{first!r}" + (f" and {len(rest)} more" if rest else "")
