"""A corpus on disk: shards of tokens that are mapped into memory, and an index of them.

A folder has ``index.json``, written last, ``tokenizer.json``, and for each shard its tokens
(``train-00000.bin``: little-endian numbers without a header) and its documents
(``train-00000.json``: their names, tokens and bytes).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from stateline.data.load import load_tokenizer
from stateline.data.token_text import TokenText
from stateline.data.tokenizer import FILE, Tokenizer
from stateline.errors import InputError

INDEX, UNFINISHED = "index.json", "unfinished.json"
FORMAT, VERSION = "stateline-corpus", 1
_OPEN = 64
_REPAIR = "the command that made it, run again, writes what is missing"


class Split:
    """The documents that are trained on, or held out, or kept for the test.

    Attributes:
        names: Name of each document.
        bytes: Bytes of the text of each document in UTF-8.
        text: The tokens of all documents.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], shards: Sequence[Mapping[str, Any]]
    ) -> None:
        described = [_read_json(folder / f"{shard['name']}.json") for shard in shards]
        try:
            self.names: list[str] = [name for part in described for name in part["names"]]
            self.bytes = _numbers(described, "bytes")
            tokens = _numbers(described, "tokens")
            sizes = [int(shard["tokens"]) for shard in shards]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"the corpus {folder} is damaged: {error}; {_REPAIR}") from error
        if not len(self.names) == len(self.bytes) == len(tokens) or tokens.sum() != sum(sizes):
            raise InputError(f"the corpus {folder} is damaged: its sizes differ; {_REPAIR}")

        @lru_cache(maxsize=_OPEN)  # a file that is mapped counts as an open one
        def load(number: int) -> np.ndarray:
            return np.memmap(folder / f"{shards[number]['name']}.bin", dtype, "r")

        self.text = TokenText(sizes, load, np.cumsum([0, *tokens.tolist()]))


class Corpus:
    """Text as tokens, as :func:`open_corpus` finds it in a folder.

    Attributes:
        folder: Where it lies.
        index: What its index says.
        newlines: Whether line ends were unified or kept.
        splits: By name: ``train``, ``held_out``, ``test``; only those that have documents.
        sha256: Differs for whatever differs in tokens, borders of documents or tokenizer.
    """

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self.folder, self.index = folder, index
        dtype, self.newlines = np.dtype(index["dtype"]), index["settings"]["newlines"]
        for shard in _shards(index):
            _check_size(folder / f"{shard['name']}.bin", shard["tokens"] * dtype.itemsize)
        self.splits = {
            name: Split(folder, dtype, shards) for name, shards in index["splits"].items()
        }
        digest = hashlib.sha256(index["tokenizer"].encode())
        for shard in _shards(index):
            digest.update((shard["name"] + shard["sha256"] + shard["documents_sha256"]).encode())
        self.sha256 = digest.hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What made the tokens.

        Raises:
            InputError: If it cannot be read, or is not the one that made them.
        """
        tokenizer = load_tokenizer(self.folder / FILE)
        if hashlib.sha256(tokenizer.to_json().encode()).hexdigest() != self.index["tokenizer"]:
            raise InputError(f"{self.folder / FILE} is not what made the corpus; {_REPAIR}")
        return tokenizer

    def verify(self) -> None:
        """Read everything, and compare it with the hashes in the index.

        Raises:
            InputError: Naming the file that differs.
        """
        assert self.tokenizer
        for shard in _shards(self.index):
            for ending, key in (("bin", "sha256"), ("json", "documents_sha256")):
                path = self.folder / f"{shard['name']}.{ending}"
                if sha256_of(path) != shard[key]:
                    raise InputError(f"{path} is damaged: delete it; {_REPAIR}")


def open_corpus(folder: str | Path) -> Corpus:
    """Open a corpus written by :func:`write_corpus`, and check the sizes of its files.

    Args:
        folder: Where it lies.

    Returns:
        The corpus; its tokens are read when they are asked for.

    Raises:
        InputError: If it is missing, unfinished or damaged.
    """
    folder = Path(folder).expanduser()
    if not (folder / INDEX).is_file():
        unfinished = (folder / UNFINISHED).is_file()
        raise InputError(
            f"the corpus {folder} is unfinished: the command that makes it, run again, goes on"
            if unfinished
            else f"no corpus in {folder}: {INDEX} is missing; make one with "
            f"stateline data SOURCE --out {folder}"
        )
    index = _read_json(folder / INDEX)
    if index.get("format") != FORMAT or index.get("version") != VERSION:
        raise InputError(
            f"{folder / INDEX} must be of the format {FORMAT}, version {VERSION}, got "
            f"{index.get('format')!r}, version {index.get('version')!r}: make the corpus again"
        )
    try:
        return Corpus(folder, index)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / INDEX} is damaged: {error!r}; {_REPAIR}") from error


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shards(index: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [shard for shards in index["splits"].values() for shard in shards]


def _numbers(described: Sequence[Mapping[str, Any]], key: str) -> Int[np.ndarray, " documents"]:
    numbers = [number for part in described for number in part[key]]
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError(f"{key!r} must be numbers")
    return np.array(numbers, dtype=np.int64)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} is damaged: {reason}; {_REPAIR}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged: it is no JSON object; {_REPAIR}")
    return value


def _check_size(path: Path, wanted: int) -> None:
    found = path.stat().st_size if path.is_file() else None
    if found != wanted:
        state = "is missing" if found is None else f"has {found} bytes"
        raise InputError(f"{path} must have {wanted} bytes, but {state}: {_REPAIR}")
