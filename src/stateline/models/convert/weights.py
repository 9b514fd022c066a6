"""Settings and tensors of published models, and how they become ours."""

import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stateline.errors import InputError
from stateline.files import read_json_object, regular_file
from stateline.layers.base import LOW_PRECISION
from stateline.models.config import MAX_SIZE, ModelConfig
from stateline.models.factory import MAX_BYTES, float32_parameters, make_empty_model
from stateline.models.language_model import LanguageModel

FILES = ("model.safetensors", "pytorch_model.bin")
"""Files with weights: a single one, or several that an index (``.index.json``) lists."""

BUFFERS = r"\.(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$|_attn_buf$"
"""Buffers in old files, which no model needs: frequencies and masks."""

_UNREADABLE = (
    SafetensorError,
    UnpicklingError,
    OSError,
    RuntimeError,
    EOFError,
    LookupError,  # this and the next two: files that are no pickle at all
    ValueError,
    TypeError,
)
"""What reading a damaged file may raise."""


def read_settings(folder: str | Path) -> dict[str, Any]:
    """Read the settings beside published weights.

    Args:
        folder: With a ``config.json``.

    Returns:
        Its content.

    Raises:
        InputError: If it is missing, or not a JSON object.
    """
    path = Path(folder) / "config.json"
    if not os.path.exists(path):  # unlike Path.exists, it never raises
        raise InputError(f"no model in {folder}: config.json is missing")
    return read_json_object(path, "published configuration", max_bytes=MAX_BYTES)


def count(settings: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer among the settings.

    Raises:
        InputError: If it is missing and has no default, or is not an integer from 1 to the largest
            size that a model may have.
    """
    value = settings.get(name, default)
    if type(value) is not int or value < 1:
        raise InputError(
            f"the published configuration must have {name!r}, an integer of at least 1, got "
            f"{value!r}: is it of another family?"
        )
    if value > MAX_SIZE:
        raise InputError(f"{name} must be at most {MAX_SIZE:,}, got {value}")
    return value


def number(settings: Mapping[str, Any], name: str, default: float) -> float:
    """A number among the settings.

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
    """Read the tensors of a published model, by their official names.

    Of pickled files, only tensors are read: no code in them is run.

    Args:
        folder: With ``model.safetensors`` or ``pytorch_model.bin``, or several of either and their
            index.

    Returns:
        The tensors, on the CPU, as they were saved; their memory is mapped from the files.

    Raises:
        InputError: If there are none, or they cannot be read.
    """
    for name in FILES:
        path, index = Path(folder) / name, Path(folder) / f"{name}.index.json"
        if path.is_file():
            return read_tensors(path)
        if index.is_file():
            # Only file names count, so that an index cannot point to another folder.
            places = section(read_json_object(index, "index of weights"), "weight_map").values()
            parts = {Path(str(place)).name for place in places}
            files = [read_tensors(path.with_name(part)) for part in sorted(parts)]
            return {name: tensor for tensors in files for name, tensor in tensors.items()}
    raise InputError(f"no weights in {folder}: it must hold {' or '.join(FILES)}")


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of one file, by their names.

    Args:
        path: A safetensors file, or a pickled one, of which only tensors are read. Of a PyTorch
            Lightning checkpoint, these are the tensors of the model.

    Returns:
        The tensors, on the CPU, as they were saved; their memory is mapped from the files.

    Raises:
        InputError: If the file cannot be read, or holds something else.
    """
    path = Path(path)
    regular_file(path, "weights file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        mapped = zipfile.is_zipfile(path)  # the format since PyTorch 1.6
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, UnpicklingError):  # PyTorch's message advises to run code in the file
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
    """Give tensors our names.

    Args:
        tensors: By official names.
        names: Our name of each official one.
        ignored: Regular expression for official names of buffers that are not needed.

    Returns:
        One tensor for each of the names.

    Raises:
        InputError: If tensors are missing or left over.
    """
    found = {name for name in tensors if not re.search(ignored, name)}
    if missing := sorted(set(names) - found):
        raise InputError(
            f"the published weights lack {some_names(missing)}: do they fit their config?"
        )
    if unexpected := sorted(found - set(names)):
        raise InputError(
            f"the published weights hold {some_names(unexpected)}, for which the model has no "
            "place: do they fit their config?"
        )
    return {ours: tensors[official] for official, ours in names.items()}


def assemble(
    config: ModelConfig,
    tensors: dict[str, Tensor],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LanguageModel:
    """Build a model with given weights; no memory is used for initial ones.

    Parameters that stay float32 (``keeps_float32``) are at least float32.

    Args:
        config: What the model is made of.
        tensors: All its parameters, by our names. The dictionary is emptied, so that its tensors
            are freed as they are copied.
        device: Where the weights shall be.
        dtype: Their precision; by default that of the tensors.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: If a tensor is missing, or its shape does not fit the configuration.
    """
    model = make_empty_model(config)
    assert isinstance(model, LanguageModel)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted.get(name):
            raise InputError(
                f"the published weights do not fit their config: {name!r} wants the shape "
                f"{wanted.get(name)}, got {tuple(tensor.shape)}"
            )
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise InputError(
            f"the configuration asks for {some_names(missing)}, which the published weights lack"
        )
    kept = float32_parameters(model)
    owned = {}
    for name in list(tensors):
        tensor = tensors.pop(name)
        wanted_dtype = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        if name in kept and wanted_dtype in LOW_PRECISION:
            wanted_dtype = torch.float32
        owned[name] = tensor.to(wanted_dtype).clone(memory_format=torch.contiguous_format)
    model.load_state_dict(owned, assign=True)
    return model.to(device).eval()


def some_names(names: Iterable[str]) -> str:
    """The first of many names, and how many more there are."""
    first, *rest = names
    return f"{first!r}" + (f" and {len(rest)} more" if rest else "")
