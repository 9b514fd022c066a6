"""Tokenizers as they are published: several files, which are read as transformers merges them.

A folder whose files say no more than we read is read without transformers. Any other is read by its
``AutoTokenizer``, whose classes may make another tokenizer than ``tokenizer.json`` describes.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stateline.data.huggingface import (
    GENERATION,
    SETTINGS,
    TEMPLATE,
    HuggingFaceTokenizer,
    SpecialTokens,
    load_pair,
)
from stateline.data.tokenizer import BYTE, CHARACTER, FILE
from stateline.errors import InputError, needed, reason
from stateline.files import read_json_object, read_text

_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that take ``tokenizer.json`` as it is."""

_VOCABULARIES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
"""Files with the tokens where there is no ``tokenizer.json``."""

MAX_BYTES = 1 << 28
"""Upper limit on the size of a tokenizer's file; vocabularies of a million tokens have 60 MB."""

_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

_HARMLESS = {
    *("add_bos_token", "add_eos_token"),  # have no effect beside a tokenizer.json
    *("backend", "is_local", "local_files_only", "model_max_length", "name_or_path"),
    *("chat_template", "padding_side", "tokenizer_class"),
}
"""Fields of ``tokenizer_config.json`` that do not change the tokens or their text."""


def load_published(folder: Path, described: Mapping[str, Any] | None) -> HuggingFaceTokenizer:
    """Read the tokenizer of a folder that has no tokenizer of ours.

    Args:
        folder: The folder.
        described: The content of its ``tokenizer.json``, if there is one.

    Raises:
        InputError: If there is none, if a file is damaged, or if transformers is needed and is
            missing, or does not read the folder.
    """
    settings = settings_of(folder, SETTINGS)
    vocabulary = described is not None or any((folder / name).is_file() for name in _VOCABULARIES)
    if vocabulary and (beyond := next(_beyond(folder, settings, described), "")):
        return _by_transformers(folder, settings, beyond)
    if described is None:
        return load_pair(folder)
    ends, chat = end_numbers(folder), _template(folder, settings)
    known = "eos_token" in settings or ends
    end = _content(settings.get("eos_token")) if known else None
    special = SpecialTokens(_content(settings.get("bos_token")), end, ends, chat)
    text = (folder / FILE).read_text(encoding="utf-8")
    return HuggingFaceTokenizer(text, str(folder / FILE), special)


def needs_transformers(folder: Path) -> bool:
    """Whether the files of a folder say more about its tokenizer than is read without transformers.

    It is no, too, where there is no tokenizer, or only one of ours.

    Raises:
        InputError: If a file is damaged.
    """
    described = settings_of(folder, FILE)
    if described.get("type") in (BYTE, CHARACTER):
        return False
    given = described or any((folder / name).is_file() for name in _VOCABULARIES[:1])
    return bool(given) and any(_beyond(folder, settings_of(folder, SETTINGS), described or None))


def _beyond(
    folder: Path, settings: Mapping[str, Any], described: Mapping[str, Any] | None
) -> Iterator[str]:
    """What in the files of a folder only transformers reads."""
    kind = settings_of(folder, "config.json").get("model_type")
    if kind not in (None, "stateline"):
        yield f"model_type={kind!r:.80}"
    if described is None and settings:
        yield SETTINGS
    for name in ("added_tokens.json", "special_tokens_map.json"):
        if (folder / name).exists():
            yield name
    class_name = settings.get("tokenizer_class", _CLASSES[0])
    if class_name not in _CLASSES:
        yield f"tokenizer_class={class_name!r:.80}"
    added = (described or {}).get("added_tokens")
    special = [
        token.get("content")
        for token in (added if isinstance(added, list) else [])
        if isinstance(token, dict) and token.get("special") is True
    ]
    for name, value in settings.items():
        named = name.removesuffix("_token") in _NAMED and (value is None or value in special)
        if name not in _HARMLESS and not named:
            yield f"{name}={value!r:.80}"


def _by_transformers(folder: Path, settings: dict[str, Any], why: str) -> HuggingFaceTokenizer:
    transformers = needed("transformers", f"a tokenizer with {why}", "hf")
    known = settings.get("tokenizer_class") or settings_of(folder, "config.json").get("model_type")
    reader = transformers.AutoTokenizer if known else transformers.PreTrainedTokenizerFast
    try:
        made = reader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend = getattr(made, "backend_tokenizer", None)
        text = backend.to_str() if backend is not None else ""
        names = [_content(made.bos_token), _content(made.eos_token)]
        chat = made.chat_template
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # transformers raises many types, and Rust panics
        raise InputError(
            f"transformers cannot read the tokenizer in {folder}: {reason(error):.300}"
        ) from error
    if not text:
        raise InputError(
            f"the tokenizer in {folder}, a {type(made).__name__}, is written in Python: only those "
            "of the package tokenizers are supported"
        )
    if "" in names and "" in (made.bos_token, made.eos_token):
        raise InputError(f"the tokenizer in {folder} has a special token without a name")
    cleans = made.clean_up_tokenization_spaces and (
        json.loads(text)["model"].get("type") != "BPE"
        or made.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    )
    for name, used in (
        ("clean_up_tokenization_spaces", cleans),
        ("split_special_tokens", made.split_special_tokens),
    ):
        if used:
            raise InputError(
                f"{name}=true in {folder / SETTINGS} is not supported: set it to false"
            )
    chat = chat.get("default") if isinstance(chat, dict) else chat
    special = SpecialTokens(names[0], names[1], end_numbers(folder), chat or "")
    return HuggingFaceTokenizer(text, str(folder), special)


def end_numbers(folder: Path) -> tuple[int, ...]:
    """Numbers of the tokens that end a generated text, by the files of a model.

    Those of ``generation_config.json`` count, or else those of ``config.json``.

    Raises:
        InputError: If a file is damaged.
    """
    files = (settings_of(folder, name) for name in (GENERATION, "config.json"))
    found = (file.get("eos_token_id") for file in files)
    ends = next((number for number in found if number is not None), None)
    ends = ends if isinstance(ends, list) else [ends]
    return tuple(number for number in ends if type(number) is int)


def settings_of(folder: Path, name: str) -> dict[str, Any]:
    """The settings in a file of a folder; empty if there is no such file."""
    path = folder / name
    if not path.is_file():
        return {}
    return read_json_object(path, "settings of a tokenizer", max_bytes=MAX_BYTES)


def _template(folder: Path, settings: dict[str, Any]) -> str:
    """The template of chats; of several, as transformers also writes them, the default one."""
    chat = settings.get("chat_template")
    if (folder / TEMPLATE).is_file():
        chat = read_text(folder / TEMPLATE, "template of chats")
    if isinstance(chat, list):
        named = (each for each in chat if isinstance(each, dict) and each.get("name") == "default")
        chat = next(named, {}).get("template")
    return chat if isinstance(chat, str) else ""


def _content(token: Any) -> str:
    """The name of a token in settings; empty if there is none."""
    return "" if token is None else str(token)
