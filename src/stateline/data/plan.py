"""How a corpus is made: settings, and the plan of its shards."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from stateline.data.documents import Document, Newlines
from stateline.data.load import load_tokenizer
from stateline.data.sources import Sources, read_sources
from stateline.data.splits import SPLITS, Splits, split_by_bytes, split_by_hash, split_by_names
from stateline.data.tokenizer import CharacterTokenizer, Tokenizer, utf8
from stateline.errors import InputError

_SAMPLE = 200_000


@dataclass(frozen=True)
class CorpusSettings:
    """How a corpus is made from its sources.

    Attributes:
        tokenizer: "byte"; "character", with the characters of all documents; or a tokenizer.json,
            its folder, or a folder with GPT-2's two files.
        held_out: Share of the documents to hold out, chosen by the hash of their texts; the last
            part if there is a single document.
        splits: Instead, a JSON file with lists of file names: "train", "held_out" (or "valid") and
            "test". Files in no list are left out.
        newlines: "unify" turns CR LF into LF and drops byte order marks, "keep" leaves them. The
            choice is recorded.
        shard_tokens: Approximate number of tokens in a shard; documents are not divided.
        text_key: Name of the field with the text, for JSON lines, Parquet and saved data sets.
        split_name: Which data set to read if several were saved together.
        end_of_text: Add the tokenizer's end-of-text token after every document.
        parts: Instead of ``held_out``, for a single document: the bytes of its training, held-out
            and test parts, in this order; enwik8 has 90000000, 5000000 and 5000000.
    """

    tokenizer: str = "byte"
    held_out: float = 0.1
    splits: str | None = None
    newlines: Newlines = "unify"
    shard_tokens: int = 1_000_000
    text_key: str = "text"
    split_name: str = "train"
    end_of_text: bool = False
    parts: list[int] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise InputError(f"held_out must be from 0 to less than 1, got {self.held_out}")
        if self.shard_tokens < 1:
            raise InputError(f"shard_tokens must be at least 1, got {self.shard_tokens}")
        if self.parts is not None and (self.splits is not None or len(self.parts) not in (2, 3)):
            raise InputError(
                "parts must be two or three numbers of bytes, and not given with splits, got "
                f"parts={self.parts} and splits={self.splits}"
            )


class Unit(NamedTuple):
    """The documents of one shard: the unit of work of a worker."""

    name: str
    documents: tuple[Document, ...]


class Plan(NamedTuple):
    """Everything that determines the files of a corpus.

    Attributes:
        tokenizer: The tokenizer.
        settings: Sources and settings, for the record.
        units: The shards.
        left_out: Number of documents in no split.
    """

    tokenizer: Tokenizer
    settings: dict[str, Any]
    units: tuple[Unit, ...]
    left_out: int

    @property
    def key(self) -> str:
        """Hash of the settings."""
        return _sha256(json.dumps(self.settings, sort_keys=True))


def make_plan(paths: Sequence[Path], settings: CorpusSettings) -> Plan:
    """Read the sources once, and assign documents to splits and shards.

    Raises:
        InputError: If a source, the tokenizer or the splits cannot be used.
    """
    fixed = None if settings.tokenizer == "character" else load_tokenizer(settings.tokenizer)
    sources = read_sources(paths, settings.text_key, settings.split_name)
    # Documents are kept as they are, so a model does not learn a token that begins them.
    tokenizer = (
        fixed.without_beginning()
        if fixed
        else CharacterTokenizer.of(
            piece for document in sources.documents for piece in document.pieces(settings.newlines)
        )
    )
    if settings.parts is not None:
        splits = split_by_bytes(sources.documents, settings.parts)
    elif settings.splits is None:
        splits = split_by_hash(sources.documents, settings.held_out)
    else:
        splits = split_by_names(sources.documents, Path(settings.splits))
    if settings.end_of_text and tokenizer.end_of_text is None:
        raise InputError(
            f"the tokenizer {settings.tokenizer} has no end-of-text token: leave end_of_text out"
        )
    size = settings.shard_tokens * _bytes_per_token(tokenizer, splits["train"], settings.newlines)
    units = [unit for split in SPLITS for unit in _units(split, splits.get(split, ()), size)]
    recorded = _settings(settings, sources, tokenizer, splits)
    left_out = max(0, len(sources.documents) - sum(map(len, splits.values())))
    return Plan(tokenizer, recorded, tuple(units), left_out)


def _settings(
    given: CorpusSettings, sources: Sources, tokenizer: Tokenizer, splits: Splits
) -> dict[str, Any]:
    settings = asdict(given) | {"tokenizer": _sha256(tokenizer.to_json())}
    if given.splits is not None:
        names = {split: [d.name for d in documents] for split, documents in splits.items()}
        settings |= {"splits": _sha256(json.dumps(names)), "held_out": None}
    elif given.parts is None and given.held_out > 0 and len(sources.documents) > 1:
        settings["held_out_by"] = "text"  # in older corpora, the name decided
    if given.end_of_text:
        settings["end_token"] = tokenizer.end_of_text
    return settings | {"sources": [list(file) for file in sources.files]}


def _bytes_per_token(
    tokenizer: Tokenizer, documents: Sequence[Document], newlines: Newlines
) -> float:
    """Estimate from the beginning of the documents, which is the same every time."""
    n_bytes = n_tokens = 0
    for document in documents:
        if n_bytes >= _SAMPLE:
            break
        text = next(document.pieces(newlines), "")[: _SAMPLE - n_bytes]
        n_bytes += len(utf8(text))
        n_tokens += sum(map(len, encode_pieces(tokenizer, [text], document)))
    return max(n_bytes, 1) / max(n_tokens, 1)


def _units(split: str, documents: Sequence[Document], size: float) -> Iterator[Unit]:
    """Group documents in order into shards of at least ``size`` bytes."""
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


def encode_pieces(
    tokenizer: Tokenizer, pieces: Iterable[str], document: Document
) -> Iterator[Int[np.ndarray, " length"]]:
    """Encode the text of a document; an error names the document."""
    try:
        yield from tokenizer.encode_pieces(pieces)
    except InputError as error:
        raise InputError(f"{document.name}: {error}") from error
    except OSError as error:
        raise InputError(
            f"cannot read {document.path}: {error.strerror}; do not change the sources"
        ) from error


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
