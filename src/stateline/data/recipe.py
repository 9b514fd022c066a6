"""How a corpus is made, and the plan of its shards."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from stateline.data.documents import Document, Newlines
from stateline.data.load import load_tokenizer
from stateline.data.sources import Sources, read_sources
from stateline.data.splits import SPLITS, Splits, split_by_hash, split_by_names
from stateline.data.tokenizer import CharacterTokenizer, Tokenizer, utf8
from stateline.errors import InputError

_SAMPLE = 200_000


@dataclass(frozen=True)
class Recipe:
    """How a corpus is made from its sources.

    Attributes:
        tokenizer: "byte"; "character" (those of all documents); or a tokenizer.json, its folder,
            or a folder with GPT-2's two files.
        held_out: Share of the documents that is held out, by the hash of their names; of a single
            document its last part.
        splits: Instead, a JSON file with lists of file names: "train", "held_out" (or "valid") and
            "test". What no list names is left out.
        newlines: "unify" makes CR LF one LF and drops byte order marks, "keep" leaves them. It is
            recorded.
        shard_tokens: About so many tokens in a shard, but no document is divided.
        text_key: Field of the text in rows of JSON and of saved data sets.
        split_name: Which data set is read where several were saved together.
    """

    tokenizer: str = "byte"
    held_out: float = 0.1
    splits: str | None = None
    newlines: Newlines = "unify"
    shard_tokens: int = 1_000_000
    text_key: str = "text"
    split_name: str = "train"

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise InputError(f"held_out must be from 0 to less than 1, got {self.held_out}")
        if self.shard_tokens < 1:
            raise InputError(f"shard_tokens must be at least 1, got {self.shard_tokens}")


class Unit(NamedTuple):
    """What one worker does at a time: the documents of a shard, which is called ``name``."""

    name: str
    documents: tuple[Document, ...]


class Plan(NamedTuple):
    """Everything that decides what the files of a corpus will be.

    Attributes:
        tokenizer: Makes the tokens.
        settings: What they are made from and how, for the record.
        units: The shards.
        left_out: Number of documents that are in no split.
    """

    tokenizer: Tokenizer
    settings: dict[str, Any]
    units: tuple[Unit, ...]
    left_out: int

    @property
    def key(self) -> str:
        """Differs for whatever differs."""
        return sha256(json.dumps(self.settings, sort_keys=True).encode())


def make_plan(paths: Sequence[Path], recipe: Recipe) -> Plan:
    """Read the sources once, and decide what goes where.

    Args:
        paths: The sources.
        recipe: How the corpus is made.

    Raises:
        InputError: If a source, the tokenizer or the splits cannot be used.
    """
    fixed = None if recipe.tokenizer == "character" else load_tokenizer(recipe.tokenizer)
    sources = read_sources(paths, recipe.text_key, recipe.split_name)
    tokenizer = fixed or CharacterTokenizer.of(
        document.text(recipe.newlines) for document in sources.documents
    )
    if recipe.splits is None:
        splits = split_by_hash(sources.documents, recipe.held_out)
    else:
        splits = split_by_names(sources.documents, Path(recipe.splits).expanduser())
    size = recipe.shard_tokens * _bytes_per_token(tokenizer, splits["train"], recipe.newlines)
    units = [unit for split in SPLITS for unit in _units(split, splits.get(split, ()), size)]
    settings = _settings(recipe, sources, tokenizer, splits)
    left_out = max(0, len(sources.documents) - sum(map(len, splits.values())))
    return Plan(tokenizer, settings, tuple(units), left_out)


def _settings(
    recipe: Recipe, sources: Sources, tokenizer: Tokenizer, splits: Splits
) -> dict[str, Any]:
    settings = asdict(recipe) | {"tokenizer": sha256(tokenizer.to_json().encode())}
    if recipe.splits is not None:
        names = {split: [d.name for d in documents] for split, documents in splits.items()}
        settings |= {"splits": sha256(json.dumps(names).encode()), "held_out": None}
    return settings | {"sources": [list(file) for file in sources.files]}


def _bytes_per_token(
    tokenizer: Tokenizer, documents: Sequence[Document], newlines: Newlines
) -> float:
    """Estimated from the beginning of the documents, so that it is the same every time."""
    n_bytes = n_tokens = 0
    for document in documents:
        if n_bytes >= _SAMPLE:
            break
        text = document.text(newlines)[: _SAMPLE - n_bytes]
        n_bytes += len(utf8(text))
        n_tokens += len(encode_part(tokenizer, text, document))
    return max(n_bytes, 1) / max(n_tokens, 1)


def _units(split: str, documents: Sequence[Document], size: float) -> Iterator[Unit]:
    """Documents one after the other, until they are of ``size`` bytes or more."""
    shard, filled, number = list[Document](), 0, 0
    for document in documents:
        end = document.size if document.end is None else document.end
        shard.append(document)
        filled += end - document.begin
        if filled >= size:
            yield Unit(f"{split}-{number:05}", tuple(shard))
            shard, filled, number = [], 0, number + 1
    if shard:
        yield Unit(f"{split}-{number:05}", tuple(shard))


def encode_part(tokenizer: Tokenizer, text: str, document: Document) -> Int[np.ndarray, " length"]:
    """Tokens of a text that is from a document.

    Args:
        tokenizer: Makes them.
        text: The text.
        document: Where it is from, for messages.

    Raises:
        InputError: If there are no tokens for the text.
    """
    try:
        return tokenizer.encode(text)
    except InputError as error:
        raise InputError(f"{document.name}: {error}") from error


def sha256(contents: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(contents).hexdigest()
