"""A model on disk: ``config.json``, ``model.safetensors``, and their hashes in ``hashes.json``."""

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.files import (
    changed_file,
    read_json_object,
    regular_file,
    sha256,
    write_atomically,
    write_text,
)
from stateline.layers.int8 import is_rounded
from stateline.models.factory import (
    PRECISIONS,
    AnyModel,
    float32_parameters,
    make_empty_model,
    read_config,
)
from stateline.models.language_model import LanguageModel
from stateline.models.sequence_head import SequenceClassifier, SequenceRegressor
from stateline.settings import check_unwrapped, uncompiled

CONFIG, WEIGHTS, HASHES = "config.json", "model.safetensors", "hashes.json"

INDEX = f"{WEIGHTS}.index.json"
"""The file that lists the parts of weights that transformers has split."""

ADAPTERS = "adapter_config.json"
"""A file beside low-rank adapters, which PEFT writes and transformers applies."""

PREFIX = "model."
"""Prefix of all tensor names in files of transformers; no tensor of ours has it."""


def save_model(
    model: AnyModel, folder: str | Path, *, write: Callable[[Path], object] | None = None
) -> None:
    """Write a model into a folder, each file atomically.

    Args:
        model: The model.
        folder: Folder of its files; it is made if it does not exist.
        write: Writes the weights into a file; by default from the model.

    Raises:
        InputError: If the folder cannot be written to.
    """
    check_unwrapped("model", model)
    model, folder = uncompiled(model), Path(folder)
    if is_rounded(model):
        raise InputError(
            "the weights of this model were rounded to int8, for use alone: save the model that "
            "was read, before to_int8_()"
        )

    def replace(file: Path) -> None:
        if write is not None:
            write(file)
        else:
            tensors = model.state_dict()
            save_file({name: x.detach().contiguous() for name, x in tensors.items()}, file)
        (folder / HASHES).unlink(missing_ok=True)  # the hashes of the replaced model

    write_atomically(folder / WEIGHTS, replace)
    write_text(folder / CONFIG, model.config.to_json())
    hashes = {name: sha256(folder / name) for name in (CONFIG, WEIGHTS)}
    write_text(folder / HASHES, json.dumps(hashes, indent=1) + "\n")


def check_manifest(folder: Path) -> None:
    """Compare the files of a folder with their hashes, if ``hashes.json`` has any.

    Raises:
        InputError: If a file is missing or differs from its hash.
    """
    if not os.path.exists(folder / HASHES):
        return
    if name := changed_file(folder, read_json_object(folder / HASHES, "list of hashes")):
        raise InputError(
            f"{folder / name} is damaged or was changed: its hash is not that in {HASHES}; restore "
            f"it, or remove {HASHES} to use it as it is"
        )


def refuse_adapters(folder: Path) -> None:
    """Raise InputError if a folder holds adapters of PEFT, which nothing here would apply."""
    if os.path.exists(folder / ADAPTERS):
        raise InputError(
            f"{folder} holds adapters ({ADAPTERS}), which would not be applied: merge them into "
            "the weights with PEFT's merge_and_unload, or take their files away"
        )


def load_model(folder: str | Path, *, device: torch.device | str = "cpu") -> LanguageModel:
    """Read a language model written by :func:`save_model`.

    Args:
        folder: Folder of its files.
        device: Device of its weights.

    Returns:
        The model, in evaluation mode, in the precision in which it was saved.

    Raises:
        InputError: If a file is missing or damaged, the weights do not fit the configuration, the
            model is of another kind, or the folder holds adapters.
    """
    return _load("language_model", folder, device)


def load_classifier(
    folder: str | Path, *, device: torch.device | str = "cpu"
) -> SequenceClassifier:
    """Read a classifier written by :func:`save_model`; otherwise like :func:`load_model`."""
    return _load("classifier", folder, device)


def load_regressor(folder: str | Path, *, device: torch.device | str = "cpu") -> SequenceRegressor:
    """Read a regressor written by :func:`save_model`; otherwise like :func:`load_model`."""
    return _load("regressor", folder, device)


_LOADERS = {
    "language_model": "load_model",
    "classifier": "load_classifier",
    "regressor": "load_regressor",
}


def _load(kind: str, folder: str | Path, device: torch.device | str) -> Any:
    return check_kind(load_any(folder, device=device), kind, folder)


def check_kind(model: AnyModel, kind: str, folder: str | Path) -> Any:
    """The model, if it is of a kind; otherwise InputError."""
    if (found := model.config.kind) != kind:
        found_kind, wanted = found.replace("_", " "), kind.replace("_", " ")
        raise InputError(
            f"the model in {folder} is a {found_kind}, not a {wanted}: {_LOADERS[found]} reads it, "
            "and stateline evaluate --task scores it"
        )
    return model


def load_any(folder: str | Path, *, device: torch.device | str = "cpu") -> AnyModel:
    """Read a model of any kind written by :func:`save_model`; like :func:`load_model`."""
    folder = Path(folder)
    refuse_adapters(folder)
    parts = _parts(folder)
    for name in (CONFIG, *parts):
        if not os.path.exists(folder / name):  # unlike Path.exists, it never raises
            raise InputError(f"no model in {folder}: {name} is missing; give the folder of a model")
    regular_file(folder / CONFIG, "model configuration")
    for name in parts:
        regular_file(folder / name, "weights file")
    check_manifest(folder)
    config = read_config(folder / CONFIG)
    try:
        model = make_empty_model(config)
    except InputError as error:
        raise InputError(f"cannot build the model of {folder / CONFIG}: {error}") from error
    try:
        tensors = _read_checked(folder, parts, model)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"the model in {folder} is damaged: {error}; save or train it again"
        ) from error
    model.load_state_dict(tensors, assign=True)
    return model.to(device).eval()


def _parts(folder: Path) -> list[str]:
    """The names of the files with weights: one of ours, or several of transformers."""
    if os.path.exists(folder / WEIGHTS) or not os.path.exists(folder / INDEX):
        return [WEIGHTS]
    places = read_json_object(folder / INDEX, "index of weights").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise InputError(f"{folder / INDEX} is damaged: it lists no weights; save the model again")
    return sorted({Path(str(place)).name for place in places.values()})


def _read_checked(folder: Path, parts: Iterable[str], model: nn.Module) -> dict[str, Tensor]:
    """The weights, after a check of names, shapes, dtypes and values against the model."""
    wanted = model.state_dict()
    with ExitStack() as files:
        homes: dict[str, Any] = {}
        for part in parts:
            file = files.enter_context(safe_open(folder / part, framework="pt"))
            homes |= dict.fromkeys(file.keys(), file)
        if homes and all(name.startswith(PREFIX) for name in homes):
            wanted = {PREFIX + name: tensor for name, tensor in wanted.items()}
        if differing := sorted(homes.keys() ^ wanted.keys()):
            raise _unfit(folder, f"only one of them has {differing[0]!r}")
        tensors = {}
        for name in sorted(homes):
            tensor = homes[name].get_tensor(name)
            if tensor.shape != wanted[name].shape:
                raise _unfit(
                    folder,
                    f"{name!r} must have the shape {tuple(wanted[name].shape)}, got "
                    f"{tuple(tensor.shape)}",
                )
            if wanted[name].is_floating_point() != (tensor.dtype in PRECISIONS):
                raise _unfit(
                    folder, f"{name!r} must be like {wanted[name].dtype}, got {tensor.dtype}"
                )
            if not tensor.isfinite().all():
                raise InputError(
                    f"the weights in {folder} are not all finite, see {name!r}: take an older "
                    "checkpoint, or train again with a lower lr"
                )
            tensors[name] = tensor.clone()  # aligned, unlike tensors in a mapped file
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    _check_precision(folder, weights, float32_parameters(model))
    return weights


def _check_precision(folder: Path, tensors: Mapping[str, Tensor], float32: Collection[str]) -> None:
    """Check that all weights have one dtype, but for the parameters that stay float32."""
    dtypes: dict[torch.dtype, str] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not (name in float32 and tensor.dtype == torch.float32):
            dtypes.setdefault(tensor.dtype, name)
    if len(dtypes) > 1:
        (first, one), (second, other), *_ = dtypes.items()
        raise _unfit(folder, f"{one!r} is {first}, but {other!r} is {second}")


def _unfit(folder: Path, how: str) -> InputError:
    return InputError(
        f"the weights in {folder} do not fit its {CONFIG}: {how}; the two files must come from one "
        "model"
    )
