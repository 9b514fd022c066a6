"""Reading settings and tensors of published models, and building our models from them."""

import os
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stateline.errors import InputError
from stateline.files import read_json_object, regular_file
from stateline.layers.base import LOW_PRECISION
from stateline.models.config import MAX_SIZE, ModelConfig
from stateline.models.factory import MAX_BYTES, float32_parameters, make_empty_model
from stateline.models.language_model import LanguageModel

FILES = ("model.safetensors", "pytorch_model.bin")
"""Files with weights: a single one, or several that an index (``.index.json``) lists."""

_UNREADABLE = (
    SafetensorError,
    UnpicklingError,
    OSError,
    RuntimeError,
    EOFError,
    LookupError,  # this and the next two: the file is no pickle
    ValueError,
    TypeError,
)
"""Exceptions that a damaged file may raise."""


def read_settings(folder: str | Path) -> dict[str, Any]:
    """The content of ``config.json``; InputError if it is missing, or not a JSON object."""
    path = Path(folder) / "config.json"
    if not os.path.exists(path):  # unlike Path.exists, it never raises
        raise InputError(
            f"no model in {folder}: config.json is missing; give the folder of a model"
        )
    return read_json_object(path, "published configuration", max_bytes=MAX_BYTES)


def count(
    settings: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 1
) -> int:
    """An integer among the settings.

    Raises:
        InputError: If it is missing and has no default, or is not an integer from the least one to
            the largest size that a model may have.
    """
    value = settings.get(name, default)
    if type(value) is not int or value < least:
        raise InputError(
            f"the published configuration must have {name!r}, an integer of at least {least}, got "
            f"{value!r}: is it of another family?"
        )
    if value > MAX_SIZE:
        raise InputError(f"{name} must be at most {MAX_SIZE:,}, got {value}")
    return value


def number(settings: Mapping[str, Any], name: str, default: float) -> float:
    """A number among the settings; InputError if it is something else."""
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, "a number", value)
    return float(value)


def flag(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean among the settings; InputError if it is something else."""
    value = settings.get(name, default)
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested object of settings; empty if it is missing or null, else InputError."""
    value = settings.get(name) or {}
    if not isinstance(value, Mapping):
        raise _wrong(name, "an object", value)
    return value


def _wrong(name: str, wanted: str, value: object) -> InputError:
    return InputError(f"the published configuration wants {name!r} to be {wanted}, got {value!r}")


class Weights(Mapping[str, Tensor]):
    """Official tensors by name; a tensor is read when it is accessed.

    Of pickled files, only tensors are read: no code in them is run. One of them is open at a time.

    Args:
        path: A folder with ``model.safetensors`` or ``pytorch_model.bin``, or several of either and
            their index; or a file, pickled unless its name ends in ``.safetensors``.

    Raises:
        InputError: If there are no weights, they cannot be read, or two files hold the same tensor:
            transformers takes the last one, whatever the index says.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self._pickled: tuple[Path, dict[str, Tensor]] = (Path(), {})
        self._places = dict[str, Path]()
        for file in _files(path) if path.is_dir() else [path]:
            for name in self._names(file):
                if (other := self._places.setdefault(name, file)) != file:
                    raise InputError(
                        f"each tensor must be in one file, but {other} and {file.name} both hold "
                        f"{name!r}: get the weights again"
                    )

    def __getitem__(self, name: str) -> Tensor:
        file = self._places[name]
        if file.suffix != ".safetensors":
            return self._open(file)[name]
        with _reading(file), safe_open(file, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _names(self, file: Path) -> list[str]:
        regular_file(file, "weights file")
        if file.suffix != ".safetensors":
            return list(self._open(file))
        with _reading(file), safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())

    def _open(self, file: Path) -> dict[str, Tensor]:
        if self._pickled[0] != file:
            self._pickled = file, _unpickled(file)
        return self._pickled[1]


def _files(folder: Path) -> list[Path]:
    for name in FILES:
        path, index = folder / name, folder / f"{name}.index.json"
        if path.is_file():
            return [path]
        if index.is_file():
            # Only file names count, so that an index cannot point to another folder.
            places = section(read_json_object(index, "index of weights"), "weight_map").values()
            return [folder / part for part in sorted({Path(str(place)).name for place in places})]
    raise InputError(f"no weights in {folder}: it must hold {' or '.join(FILES)}")


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise InputError if the file cannot be read."""
    try:
        yield
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, UnpicklingError):  # PyTorch's message advises to run code in the file
            reason = "it is damaged, or holds more than tensors"
        raise InputError(f"cannot read the weights in {file}: {reason}; get them again") from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickled file, or of the model in a PyTorch Lightning checkpoint."""
    with _reading(file):
        mapped = zipfile.is_zipfile(file)  # the format since PyTorch 1.6
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    if isinstance(tensors, dict) and "pytorch-lightning_version" in tensors:
        state = tensors.get("state_dict", {})
        tensors = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise InputError(f"{file} does not hold tensors by name")
    return tensors


def check_names(
    found: Collection[str], wanted: Collection[str], optional: Collection[str] = ()
) -> None:
    """Compare the names of official tensors; InputError if any is missing or left over."""
    if missing := sorted(set(wanted) - set(found)):
        raise InputError(
            f"the published weights lack {some_names(missing)}: do they fit their config?"
        )
    if unexpected := sorted(set(found) - set(wanted) - set(optional)):
        raise InputError(
            f"the published weights hold {some_names(unexpected)}, for which the model has no "
            "place: do they fit their config?"
        )


def assemble(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LanguageModel:
    """Build a model with given weights; no memory is used for initial ones.

    Parameters that stay float32 (``keeps_float32``) are at least float32.

    Args:
        config: Configuration of the model.
        tensors: All its parameters, by our names, each in memory of its own.
        device: Device of the weights.
        dtype: Precision of the parameters; by default that of the embedding, for layers compute in
            one precision and some files keep norms or routers in another.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: If a tensor is missing, or its shape does not fit the configuration.
    """
    model = make_empty_model(config)
    assert isinstance(model, LanguageModel)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    kept, owned = float32_parameters(model), {}
    for name, tensor in tensors:
        if tuple(tensor.shape) != wanted.get(name):
            raise InputError(
                f"the published weights do not fit their config: {name!r} wants the shape "
                f"{wanted.get(name)}, got {tuple(tensor.shape)}"
            )
        wanted_dtype = dtype or tensor.dtype
        if name in kept and wanted_dtype in LOW_PRECISION:
            wanted_dtype = torch.float32
        owned[name] = tensor.to(device, wanted_dtype, memory_format=torch.contiguous_format)
    if missing := sorted(wanted.keys() - owned.keys()):
        raise InputError(
            f"the configuration asks for {some_names(missing)}, which the published weights lack"
        )
    own = owned["embedding.weight"].dtype
    for name in dict(model.named_parameters()).keys() - kept:
        owned[name] = owned[name].to(own)
    model.load_state_dict(owned, assign=True)
    return model.to(device).eval()


def some_names(names: Iterable[str]) -> str:
    """The first of many names, and the number of the others."""
    first, *rest = names
    return f"{first!r}" + (f" and {len(rest)} more" if rest else "")
