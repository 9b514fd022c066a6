"""Loading a tokenizer of any kind."""

from pathlib import Path
from typing import Any

from stateline.data.huggingface import HuggingFaceTokenizer
from stateline.data.published_tokenizer import MAX_BYTES, load_published
from stateline.data.tokenizer import (
    BYTE,
    CHARACTER,
    FILE,
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
)
from stateline.errors import InputError
from stateline.files import read_json_object, user_path


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Read a tokenizer.

    Args:
        spec: ``"byte"``; the file ``tokenizer.json`` of any tokenizer of ours or of Hugging Face;
            or a folder with that file, or with GPT-2's two: ``encoder.json`` (or ``vocab.json``)
            and ``vocab.bpe`` (or ``merges.txt``). The other files of a published tokenizer count
            as in transformers, which reads those that say more than the names of special tokens.

    Raises:
        InputError: If there is none, if its file is damaged, or if the package ``tokenizers`` is
            needed and missing.

    Example:
        >>> load_tokenizer("byte").decode([104, 105])
        'hi'
    """
    if spec == "byte":
        return ByteTokenizer()
    path = user_path(spec, "tokenizer")
    if path.is_dir() and not (path / FILE).is_file():
        return load_published(path, None)
    return _load_file(path / FILE if path.is_dir() else path)


def _load_file(path: Path) -> Tokenizer:
    if not path.exists():
        raise InputError(f"there is no tokenizer {path}: give 'byte', a {FILE} or its folder")
    described = read_json_object(path, "tokenizer", max_bytes=MAX_BYTES)
    kind = described.get("type")
    if kind == BYTE:
        return ByteTokenizer()
    if kind == CHARACTER:
        return _from_characters(path, described)
    if path.name == FILE:
        return load_published(path.parent, described)
    return HuggingFaceTokenizer(path.read_text(encoding="utf-8"), str(path))


def _from_characters(path: Path, described: dict[str, Any]) -> CharacterTokenizer:
    characters = described.get("characters")
    if not isinstance(characters, str):
        raise InputError(f"the tokenizer {path} is damaged: it has no characters; build it again")
    try:
        return CharacterTokenizer(characters)
    except InputError as error:
        raise InputError(f"the tokenizer {path} is damaged: {error}") from error
