"""Reading a tokenizer of any kind."""

import json
from pathlib import Path
from typing import Any

from stateline.data.huggingface import HuggingFaceTokenizer, load_pair
from stateline.data.tokenizer import (
    BYTE,
    CHARACTER,
    FILE,
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
)
from stateline.errors import InputError


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Read a tokenizer.

    Args:
        spec: ``"byte"``; the file ``tokenizer.json`` of any tokenizer of ours or of Hugging Face;
            or a folder with that file, or with GPT-2's two: ``encoder.json`` (or ``vocab.json``)
            and ``vocab.bpe`` (or ``merges.txt``).

    Returns:
        The tokenizer.

    Raises:
        InputError: If there is none, if its file is damaged, or if the package ``tokenizers`` is
            needed and missing.

    Example:
        >>> load_tokenizer("byte").decode([104, 105])
        'hi'
    """
    path = Path(spec).expanduser()
    if spec == "byte":
        return ByteTokenizer()
    if path.is_dir() and not (path / FILE).is_file():
        return load_pair(path)
    return _load_file(path / FILE if path.is_dir() else path)


def _load_file(path: Path) -> Tokenizer:
    try:
        text = path.read_text(encoding="utf-8")
        described = json.loads(text)
    except OSError as error:
        raise InputError(
            f"no tokenizer {str(path)!r}: {error.strerror}; give 'byte', a {FILE} or its folder"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"the tokenizer {path} is damaged: {error}; copy or build it again"
        ) from error
    kind = described.get("type") if isinstance(described, dict) else None
    if kind == BYTE:
        return ByteTokenizer()
    if kind == CHARACTER:
        return _from_characters(path, described)
    return HuggingFaceTokenizer(text, str(path))


def _from_characters(path: Path, described: dict[str, Any]) -> CharacterTokenizer:
    characters = described.get("characters")
    if not isinstance(characters, str):
        raise InputError(f"the tokenizer {path} is damaged: it has no characters; build it again")
    try:
        return CharacterTokenizer(characters)
    except InputError as error:
        raise InputError(f"the tokenizer {path} is damaged: {error}") from error
