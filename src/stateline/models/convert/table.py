"""All formats of published models, and how to read, recognise and write them."""

# ruff: noqa: ARG005 (the functions of all converters take the same arguments)

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from stateline.errors import InputError, unknown_name
from stateline.files import regular_file, user_path, write_folder, write_text
from stateline.models.checkpoint import load_model, save_model
from stateline.models.config import ModelConfig
from stateline.models.convert import (
    gpt_neox,
    h3,
    mamba,
    repeat_after_me,
    to_h3,
    to_mamba,
    transformer_sequential,
)
from stateline.models.convert.expressible import check_expressible
from stateline.models.convert.families import FAMILIES, MISSING, Family
from stateline.models.convert.parts import flat_layers
from stateline.models.convert.weights import (
    BUFFERS,
    assemble,
    read_settings,
    read_tensors,
    read_weights,
)
from stateline.models.language_model import LanguageModel

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
"""Files of tokenizers, which are copied beside a converted model."""

CHECKPOINTS = (".pt", ".pth", ".ckpt")
"""Endings of files of weights that may have any name."""

Settings = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
Tensors = Mapping[str, Tensor]


class Converter(NamedTuple):
    """A format of whole models.

    Attributes:
        about: What it is, in a few words.
        recognise: Whether settings (``{}`` if there are none) and shapes of tensors are of it.
        config: Our configuration, from settings and shapes.
        weights: Our tensors, from theirs and the settings.
        back: Their tensors and settings, from our tensors and configuration.
        one_way: Why there is no way back, if there is none.
        file: Name of the weights file that the official program reads.
    """

    about: str
    recognise: Callable[[Settings, Shapes], bool]
    config: Callable[[Settings, Shapes], ModelConfig]
    weights: Callable[[Tensors, Settings], dict[str, Tensor]]
    back: Callable[[Tensors, ModelConfig], tuple[dict[str, Tensor], dict[str, Any]]] | None = None
    one_way: str = ""
    file: str = "model.safetensors"


class Pretrained(NamedTuple):
    """A model that was read from a published format.

    Attributes:
        model: In evaluation mode.
        format: Name of the format: a key of ``CONVERTERS``, or ``stateline``.
        ignored: Names of tensors in the file that were not needed: buffers, and tied copies.
    """

    model: LanguageModel
    format: str
    ignored: tuple[str, ...]


def _has(shapes: Collection[str], *endings: str) -> bool:
    return all(any(name.endswith(ending) for name in shapes) for ending in endings)


def _official_h3(tensors: Tensors, config: ModelConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    official = to_h3.h3_tensors(tensors, config)
    attention = [layer for layer in flat_layers(config) if layer.name == "attention"]
    settings: dict[str, Any] = {"layer_norm_epsilon": config.norm_eps}
    heads = {"num_heads": attention[0].keywords["n_heads"]} if attention else {}
    return official, settings | heads


def _h3_weights(tensors: Tensors, settings: Settings) -> dict[str, Tensor]:
    config = h3.h3_config(settings, {name: tuple(t.shape) for name, t in tensors.items()})
    return h3.h3_weights(tensors, config, head_order=settings.get("head_order", "fused"))


CONVERTERS: dict[str, Converter] = {
    "h3": Converter(
        "H3 of HazyResearch/H3: released, older and PyTorch Lightning files",
        lambda settings, shapes: _has(shapes, "mixer.ssm_k_D"),
        h3.h3_config,
        _h3_weights,
        _official_h3,
        file="model.pt",
    ),
    "mamba": Converter(
        "Mamba and Mamba-2 of state-spaces/mamba",
        lambda settings, shapes: "ssm_cfg" in settings and _has(shapes, "mixer.A_log"),
        lambda settings, shapes: mamba.mamba_config(settings),
        mamba.mamba_weights,
        lambda tensors, config: (
            to_mamba.mamba_tensors(tensors, config, hugging_face=False),
            to_mamba.mamba_settings(config, tensors, hugging_face=False),
        ),
        file="pytorch_model.bin",
    ),
    "mamba-hf": Converter(
        "Mamba, Mamba-2 and Falcon-Mamba of Hugging Face transformers",
        lambda settings, shapes: settings.get("model_type") in ("mamba", "mamba2", "falcon_mamba"),
        lambda settings, shapes: mamba.mamba_config(settings),
        mamba.mamba_weights,
        lambda tensors, config: (
            to_mamba.mamba_tensors(tensors, config, hugging_face=True),
            to_mamba.mamba_settings(config, tensors, hugging_face=True),
        ),
    ),
    "repeat_after_me": Converter(
        "Transformers of Repeat After Me; settings have position and masked_heads",
        lambda settings, shapes: "position" in settings and _has(shapes, "query_key_value.weight"),
        lambda settings, shapes: repeat_after_me.repeat_after_me_config(settings),
        gpt_neox.gpt_neox_weights,
        lambda tensors, config: (
            gpt_neox.gpt_neox_tensors(tensors, config),
            repeat_after_me.repeat_after_me_settings(config),
        ),
    ),
    "gpt_neox": Converter(
        "GPT-NeoX and Pythia of Hugging Face transformers",
        lambda settings, shapes: settings.get("model_type") == "gpt_neox",
        lambda settings, shapes: gpt_neox.gpt_neox_config(settings),
        gpt_neox.gpt_neox_weights,
        lambda tensors, config: (
            gpt_neox.gpt_neox_tensors(tensors, config),
            gpt_neox.gpt_neox_settings(config),
        ),
    ),
    "repeat_after_me_lstm": Converter(
        "the LSTM of Repeat After Me",
        lambda settings, shapes: {"word_embeddings.weight", "lstm.weight_hh_l0"} <= shapes.keys(),
        lambda settings, shapes: repeat_after_me.repeat_after_me_lstm_config(shapes),
        lambda tensors, settings: repeat_after_me.repeat_after_me_lstm_weights(tensors),
        lambda tensors, config: (repeat_after_me.repeat_after_me_lstm_tensors(tensors, config), {}),
    ),
    "transformer_sequential": Converter(
        "models of facebookresearch/transformer-sequential; settings have kind",
        lambda settings, shapes: {"in_emb.weight", "out.out_emb.weight"} <= shapes.keys(),
        lambda settings, shapes: transformer_sequential.transformer_sequential_config(
            settings, settings.get("kind", "transformer_xl")
        ),
        lambda tensors, settings: transformer_sequential.transformer_sequential_weights(
            tensors, settings, settings.get("kind", "transformer_xl")
        ),
        one_way="the official program reads only checkpoints that also hold its optimizer",
    ),
}


def _family_converter(kind: str, family: Family) -> Converter:
    return Converter(
        family.about,
        lambda settings, shapes: settings.get("model_type") == kind,
        lambda settings, shapes: family.config(settings),
        family.read,
        family.write,
    )


CONVERTERS |= {kind: _family_converter(kind, family) for kind, family in FAMILIES.items()}
"""Formats by name; the first that recognises a model is used. Formats of single layers have
functions of their own in the modules of :mod:`stateline.models.convert`."""


def load_pretrained(
    path: str | Path,
    *,
    settings: Settings | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LanguageModel:
    """Read a language model in any known format, ours included.

    Args:
        path: A folder with weights and usually a ``config.json``, or a file with weights.
        settings: Added to those of ``config.json``, or in place of them.
        device: Where the weights shall be.
        dtype: Precision of the weights; by default as they were saved.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: If no format is recognised, a file is missing or damaged, or tensors are
            missing, left over or of another shape.
    """
    return read_pretrained(path, settings=settings, device=device, dtype=dtype).model


def read_pretrained(
    path: str | Path,
    *,
    settings: Settings | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Pretrained:
    """Read a model like :func:`load_pretrained`, and tell what was recognised."""
    path = user_path(path, "model")
    folder = path if path.is_dir() else path.parent
    found = {**_settings(folder), **(settings or {})}
    if path.is_dir() and "pattern" in found:
        model = load_model(path, device=device)
        return Pretrained(model if dtype is None else model.to(dtype), "stateline", ())
    tensors = _tensors(path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    name, converter = _recognise(found, shapes, path)
    config = converter.config(found, shapes)
    ours = converter.weights(tensors, found)
    ignored = _ignored(tensors, ours)
    return Pretrained(assemble(config, ours, device=device, dtype=dtype), name, ignored)


def write_pretrained(
    model: LanguageModel,
    folder: str | Path,
    to: str = "stateline",
    *,
    tokenizer_from: Path | None = None,
) -> None:
    """Write a model into a new folder.

    Args:
        model: The model.
        folder: Where its files shall be; it must not exist.
        to: ``stateline``, or a format of ``CONVERTERS`` that can be written.
        tokenizer_from: Folder whose tokenizer files (``TOKENIZER_FILES``) are copied.

    Raises:
        InputError: If the format cannot express the model, or the folder exists or cannot be
            written to.
    """
    writable = [name for name, converter in CONVERTERS.items() if converter.back]
    if to not in ("stateline", *writable):
        raise unknown_name("format to write", to, ["stateline", *writable])
    folder = user_path(folder, "folder for the model")
    if folder.exists():
        raise InputError(f"{folder} exists: choose another folder, or remove it")
    copied = tokenizer_files(tokenizer_from)
    write = save_model if to == "stateline" else _official(model, CONVERTERS[to])

    def fill(draft: Path) -> None:
        write(model, draft)
        for path in copied:
            shutil.copyfile(path, draft / path.name)

    write_folder(folder, fill)


def _official(model: LanguageModel, converter: Converter) -> Callable[[LanguageModel, Path], None]:
    """What writes the model in an official format; InputError if that cannot express it."""
    assert converter.back is not None
    tensors, settings = converter.back(model.state_dict(), model.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_expressible(model.config, converter.config(settings, shapes))

    def write(_: LanguageModel, folder: Path) -> None:
        _write_tensors(tensors, folder / converter.file)
        write_text(folder / "config.json", json.dumps(settings, indent=2) + "\n")

    return write


def tokenizer_files(folder: Path | None) -> list[Path]:
    """The files of a tokenizer in a folder.

    Raises:
        InputError: If one of them is not a regular file.
    """
    found = [folder / name for name in TOKENIZER_FILES] if folder else []
    found = [path for path in found if path.exists()]
    for path in found:
        regular_file(path, "tokenizer")
    return found


def is_published(folder: Path) -> bool:
    """Whether a file or folder holds a model, but not with a ``config.json`` of ours."""
    config = folder / "config.json"
    try:
        if config.is_file():
            return "pattern" not in read_settings(folder)
    except InputError:
        return False  # damaged: to be reported by whoever reads it
    if folder.is_file():
        return folder.suffix in (*CHECKPOINTS, ".bin", ".safetensors")
    return not config.exists() and any(f.suffix in CHECKPOINTS for f in folder.glob("*"))


def published_config(folder: Path) -> ModelConfig:
    """Our configuration of a published model; reads no more weights than it needs.

    Raises:
        InputError: If no format is recognised.
    """
    settings = _settings(folder if folder.is_dir() else folder.parent)
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(folder).items()}
    return _recognise(settings, shapes, folder)[1].config(settings, shapes)


def _settings(folder: Path) -> dict[str, Any]:
    return read_settings(folder) if (folder / "config.json").exists() else {}


def _tensors(path: Path) -> dict[str, Tensor]:
    """Those of a file, or of a folder with weights by any name if there is a single file."""
    if not path.is_dir():
        return read_tensors(path)
    files = [f for f in path.iterdir() if f.suffix in (*CHECKPOINTS, ".safetensors")]
    standard = any(path.glob("model*.safetensors*")) or any(path.glob("pytorch_model*"))
    return read_tensors(files[0]) if len(files) == 1 and not standard else read_weights(path)


def _recognise(settings: Settings, shapes: Shapes, path: Path) -> tuple[str, Converter]:
    for name, converter in CONVERTERS.items():
        if converter.recognise(settings, shapes):
            return name, converter
    if missing := MISSING.get(str(settings.get("model_type"))):
        raise InputError(
            f"{path} holds a {settings['model_type']} model, which needs layers that are not "
            f"supported: {missing}"
        )
    seen = settings.get("model_type") or ", ".join(list(shapes)[:3])
    raise InputError(
        f"the model in {path} is of no known format ({seen}): known are {', '.join(CONVERTERS)}"
    )


def _ignored(tensors: Tensors, ours: Tensors) -> tuple[str, ...]:
    """Buffers and tied copies: every official tensor is used, refused, or one of these."""
    tied = () if "head.weight" in ours else ("lm_head.weight", "embed_out.weight")
    return tuple(name for name in tensors if name in tied or re.search(BUFFERS, name))


def _write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write with safetensors, or pickled where the official program reads no other file."""
    if path.suffix != ".safetensors":
        torch.save({name: tensor.cpu() for name, tensor in tensors.items()}, path)
        return
    owned = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(owned, path, metadata={"format": "pt"})
