"""All formats of published models; reading, recognising and writing them."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from stateline.errors import InputError, check_choice
from stateline.files import model_path, regular_file, user_path, write_folder, write_text
from stateline.models.checkpoint import load_model, refuse_adapters, save_model
from stateline.models.config import ModelConfig
from stateline.models.convert import (
    decoders,
    gemma,
    gguf,
    gpt,
    gpt_neox,
    h3,
    hybrids,
    linear_attention,
    mamba,
    qwen,
    recurrent_gemma,
    rwkv7,
    transformer_sequential,
    zamba2,
)
from stateline.models.convert.converter import Converter
from stateline.models.convert.expressible import check_expressible
from stateline.models.convert.fields import Settings
from stateline.models.convert.parts import BUFFERS
from stateline.models.convert.weights import Weights, assemble, read_settings
from stateline.models.factory import check_precision
from stateline.models.language_model import LanguageModel

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files of tokenizers, which are copied beside a converted model."""

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of ``config.json`` with the numbers of special tokens."""

CHECKPOINTS = (".pt", ".pth", ".ckpt")
"""Suffixes of weight files, which may have any name."""

SHARD_BYTES = 512 << 20
"""Tensors are written in files of about this size, which bounds the memory for copies."""

CONVERTERS: dict[str, Converter] = {
    name: converter
    for module in (
        h3,
        mamba,
        gpt_neox,
        transformer_sequential,
        gpt,
        decoders,
        gemma,
        hybrids,
        linear_attention,
        qwen,
        recurrent_gemma,
        rwkv7,
        zamba2,
    )
    for name, converter in module.CONVERTERS.items()
}
"""Formats by name; the first that recognises a model is used. Single layers are read and
written by :mod:`stateline.models.convert.single_layers`."""

MISSING: Mapping[str, str] = {
    "deepseek_v2": "latent attention and mixtures of experts",
    "deepseek_v3": "latent attention and mixtures of experts",
    "gpt_oss": "mixtures of experts and attention sinks",
    "zamba": "attention blocks that several layers share and that read the embeddings again",
}
"""Why other families cannot be read, by ``model_type``."""


class Pretrained(NamedTuple):
    """A model that was read from a published format.

    Attributes:
        model: In evaluation mode.
        format: Name of the format: a key of ``CONVERTERS``, or ``stateline``.
        ignored: Names of tensors in the file that were not needed: buffers, and tied copies.
        tokens: The fields ``TOKENS`` of its ``config.json`` that have a value.
    """

    model: LanguageModel
    format: str
    ignored: tuple[str, ...]
    tokens: Mapping[str, Any]


def load_pretrained(
    source: str | Path | Mapping[str, Tensor],
    *,
    settings: Settings | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LanguageModel:
    """Read a language model in any known format, ours included.

    Args:
        source: A folder with weights and usually a ``config.json``, a file with weights, a GGUF
            file of llama.cpp, whose weights become float32, or a state dict by official names.
        settings: Added to ``config.json``; they replace its fields of the same names.
        device: Where the weights shall be.
        dtype: Precision of the weights; by default that in which the embedding was saved.

    Returns:
        The model, in evaluation mode. Parameters that stay float32 (``keeps_float32``) are at least
        float32.

    Raises:
        InputError: If no format is recognised, a file is missing or damaged, or tensors are
            missing, left over or of another shape.
    """
    return read_pretrained(source, settings=settings, device=device, dtype=dtype).model


def read_pretrained(
    source: str | Path | Mapping[str, Tensor],
    *,
    settings: Settings | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Pretrained:
    """Read a model like :func:`load_pretrained`, and also return the recognised format."""
    check_precision(dtype)
    found, tensors = dict(settings or {}), source
    if not isinstance(source, Mapping):
        path = model_path(source)
        refuse_adapters(path)
        if path.is_dir() and "pattern" in (found := _settings(path) | found):
            model = load_model(path, device=device)
            model = model if dtype is None else model.to(dtype)
            return Pretrained(model, "stateline", (), _special(found))
        own, tensors = _opened(path)
        found = own | found
    assert isinstance(tensors, Mapping)
    name, converter, found = _recognise(
        found, tensors, "a state dict" if tensors is source else source
    )
    ours = converter.read(tensors, found, dtype)
    model = assemble(converter.config(found), ours, device=device, dtype=dtype)
    return Pretrained(model, name, _ignored(tensors, model), _special(found))


def _special(settings: Settings) -> dict[str, Any]:
    return {name: settings[name] for name in TOKENS if settings.get(name) is not None}


def write_pretrained(
    model: LanguageModel,
    folder: str | Path,
    to: str = "stateline",
    *,
    tokenizer_from: Path | None = None,
    tokens: Mapping[str, Any] | None = None,
) -> None:
    """Write a model into a new folder.

    Args:
        model: The model.
        folder: Where its files shall be; it must not exist.
        to: ``stateline``, or a format of ``CONVERTERS`` that can be written.
        tokenizer_from: Folder whose tokenizer files (``TOKENIZER_FILES``) are copied.
        tokens: Fields ``TOKENS`` for the ``config.json`` of a family of transformers, which has
            numbers of its own for those that are missing.

    Raises:
        InputError: If the format cannot express the model, or the folder exists or cannot be
            written to.
    """
    writable = [name for name, converter in CONVERTERS.items() if converter.settings]
    check_choice("format to write", to, ["stateline", *writable])
    folder = user_path(folder, "folder for the model")
    if folder.exists():
        raise InputError(f"{folder} exists: choose another folder, or remove it")
    copied = tokenizer_files(tokenizer_from)
    write = save_model if to == "stateline" else _official(model, CONVERTERS[to], tokens or {})

    def fill(draft: Path) -> None:
        write(model, draft)
        for path in copied:
            shutil.copyfile(path, draft / path.name)

    write_folder(folder, fill)


def _official(
    model: LanguageModel, converter: Converter, tokens: Mapping[str, Any]
) -> Callable[[LanguageModel, Path], None]:
    """A function that writes the model in a format; InputError if that cannot express it."""
    settings, tensors = converter.write_settings(model.config), model.state_dict()
    settings |= tokens if converter.kinds else {}
    again = converter.completed(settings, converter.write(tensors, model.config))
    check_expressible(model.config, converter.config(again))

    def write(_: LanguageModel, folder: Path) -> None:
        _write_tensors(converter.write(tensors, model.config), folder / converter.file)
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
        return folder.suffix in (*CHECKPOINTS, ".bin", ".safetensors", gguf.SUFFIX)
    return any(f.suffix in CHECKPOINTS for f in folder.glob("*"))


def published_config(folder: Path) -> ModelConfig:
    """Our configuration of a published model; reads no more weights than it needs.

    Raises:
        InputError: If no format is recognised.
    """
    _, converter, settings = _recognise(*_opened(folder), folder)
    return converter.config(settings)


def _opened(path: Path) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The settings and the tensors of a folder or a file."""
    if path.suffix != gguf.SUFFIX or path.is_dir():
        return _settings(path), _tensors(path)
    tensors = gguf.GGUF(path)
    _, converter, settings = _recognise(tensors.settings, tensors, path)
    tensors.name(converter.official(settings))
    return tensors.settings, tensors


def _settings(path: Path) -> dict[str, Any]:
    folder = path if path.is_dir() else path.parent
    return read_settings(folder) if (folder / "config.json").exists() else {}


def _tensors(path: Path) -> Weights:
    """The tensors of a file, or of a folder: of any name if it has a single file of weights."""
    if not path.is_dir():
        return Weights(path)
    files = [f for f in path.iterdir() if f.suffix in (*CHECKPOINTS, ".safetensors")]
    standard = any(path.glob("model*.safetensors*")) or any(path.glob("pytorch_model*"))
    return Weights(files[0] if len(files) == 1 and not standard else path)


def _recognise(
    settings: Settings, tensors: Mapping[str, Tensor], source: object
) -> tuple[str, Converter, dict[str, Any]]:
    """Name and converter of the format, and the settings, completed from the tensors' shapes."""
    for name, converter in CONVERTERS.items():
        if converter.recognises(settings, tensors):
            return name, converter, converter.completed(settings, tensors.items())
    if missing := MISSING.get(str(settings.get("model_type"))):
        raise InputError(
            f"{source} holds a {settings['model_type']} model, which needs layers that are not "
            f"supported: {missing}"
        )
    seen = settings.get("model_type") or ", ".join(list(tensors)[:3])
    raise InputError(
        f"the model in {source} is of no known format ({seen}): known are {', '.join(CONVERTERS)}; "
        "one of your own needs --import FILE"
    )


def _ignored(names: Iterable[str], model: LanguageModel) -> tuple[str, ...]:
    """Buffers and tied copies: every official tensor is used, refused, or one of these."""
    tied = ("lm_head.weight", "embed_out.weight") if model.head is None else ()
    return tuple(name for name in names if name in tied or re.search(BUFFERS, name))


def _write_tensors(tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Write with safetensors, or pickled where the official program reads no other file.

    Large models are written in shards, as transformers does: one after the other, so that only the
    tensors of one shard are in memory twice.
    """
    if path.suffix != ".safetensors":
        torch.save({name: tensor.cpu() for name, tensor in tensors}, path)
        return
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(shard, path.with_name(f"{len(shards)}.part"), metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        shard[name] = tensor.cpu().contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        path.with_name("0.part").rename(path)
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        part = f"{path.stem}-{number + 1:05}-of-{len(shards):05}{path.suffix}"
        path.with_name(f"{number}.part").rename(path.with_name(part))
        places |= dict.fromkeys(names, part)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_text(path.with_name(f"{path.name}.index.json"), json.dumps(index, indent=2) + "\n")
