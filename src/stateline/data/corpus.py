"""A corpus on disk: shards of tokens that are mapped into memory, and their index.

A folder holds ``index.json``, which is written last, and ``tokenizer.json``. Each shard has a file
of tokens (``train-00000.bin``: little-endian numbers of the smallest size that the vocabulary
allows, without a header) and a file about its
documents (``train-00000.json``: their names, tokens and bytes).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt

from stateline.data.index import (
    FORMAT,
    REPAIR,
    VERSION,
    Index,
    ShardDocuments,
    ShardEntry,
    TokenHash,
    damaged,
    parse,
)
from stateline.data.load import load_tokenizer
from stateline.data.token_text import TokenText
from stateline.data.tokenizer import FILE, Tokenizer
from stateline.errors import InputError
from stateline.files import read_json_object, sha256, user_path

INDEX, UNFINISHED = "index.json", "unfinished.json"


class Split:
    """One part of a corpus: documents to train on, held-out documents, or test documents.

    Attributes:
        names: Name of each document.
        bytes: Bytes of the text of each document in UTF-8.
        text: The tokens of all documents.
    """

    def __init__(self, folder: Path, dtype: np.dtype[Any], shards: Sequence[ShardEntry]) -> None:
        described = [_documents(folder / f"{shard.name}.json", shard) for shard in shards]
        self.names: list[str] = [name for part in described for name in part.names]
        self.bytes = np.array([n for part in described for n in part.bytes], dtype=np.int64)
        tokens = np.array([n for part in described for n in part.tokens], dtype=np.int64)
        self.files = [folder / f"{shard.name}.bin" for shard in shards]

        @lru_cache(maxsize=64)  # a mapped file counts as an open file
        def load(number: int) -> np.ndarray:
            if not shards[number].tokens:
                return np.empty(0, dtype)
            return np.memmap(self.files[number], dtype, "r")

        sizes = [shard.tokens for shard in shards]
        self.text = TokenText(sizes, load, np.concatenate([[0], np.cumsum(tokens)]))


class Corpus:
    """Text as tokens, as :func:`open_corpus` finds it in a folder.

    Attributes:
        folder: The folder.
        index: Contents of its index.
        newlines: Whether line ends were unified or kept.
        splits: By name: ``train``, ``held_out``, ``test``; without splits that have no documents.
        sha256: Hash of tokens, document borders and tokenizer.
    """

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self.folder, self.index = folder, index
        checked = parse(index, Index, folder / INDEX)
        dtype, self.newlines = np.dtype(checked.dtype), checked.settings.newlines
        self._shards = [shard for shards in checked.splits.values() for shard in shards]
        for shard in self._shards:
            _check_size(folder / f"{shard.name}.bin", shard.tokens * dtype.itemsize)
        self.splits: dict[str, Split] = {
            name: Split(folder, dtype, shards) for name, shards in checked.splits.items()
        }
        digest = hashlib.sha256(checked.tokenizer.encode())
        for shard in self._shards:
            digest.update((shard.name + shard.sha256 + shard.documents_sha256).encode())
        self.sha256 = digest.hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            InputError: If it cannot be read, or is not the tokenizer that made the tokens.
        """
        tokenizer = load_tokenizer(self.folder / FILE)
        if hashlib.sha256(tokenizer.to_json().encode()).hexdigest() != self.index["tokenizer"]:
            raise InputError(f"{self.folder / FILE} is not what made the corpus; {REPAIR}")
        if (size := self.index["vocab_size"]) != tokenizer.vocab_size:
            reason = (
                f"its vocab_size is {size}, but the tokenizer has {tokenizer.vocab_size} tokens"
            )
            raise damaged(self.folder / INDEX, reason)
        return tokenizer

    def check_tokens(self) -> None:
        """Read all tokens to train on and to score, and check that they are in the vocabulary.

        Raises:
            InputError: Naming the file that has another token.
        """
        size = self.tokenizer.vocab_size
        for name in ("train", "held_out"):
            for file in self.splits[name].files if name in self.splits else ():
                largest = _largest(file, np.dtype(self.index["dtype"]), file.stat().st_mtime_ns)
                if largest >= size:
                    reason = f"it has token {largest}, and the vocabulary ends at {size - 1}"
                    raise damaged(file, f"{reason}; delete it")

    def verify(self) -> None:
        """Read everything, and compare it with the hashes in the index.

        Raises:
            InputError: Naming the file that differs.
        """
        assert self.tokenizer
        for shard in self._shards:
            tokens, documents = (self.folder / f"{shard.name}.{end}" for end in ("bin", "json"))
            digest = TokenHash()
            for block in _blocks(tokens, np.dtype(self.index["dtype"])):
                digest.update(block)
            for path, found, wanted in (
                (tokens, digest.hexdigest(), shard.sha256),
                (documents, sha256(documents), shard.documents_sha256),
            ):
                if found != wanted:
                    raise InputError(f"{path} is damaged: delete it; {REPAIR}")


@lru_cache(maxsize=4096)
def _largest(file: Path, dtype: np.dtype[Any], written: int) -> int:  # noqa: ARG001  # part of the key
    """The largest token of a file."""
    return max((int(block.max()) for block in _blocks(file, dtype)), default=0)


def _blocks(file: Path, dtype: np.dtype[Any]) -> Iterator[UInt[np.ndarray, " block"]]:
    """The tokens of a file in blocks, which fit into memory."""
    with file.open("rb") as opened:
        while len(block := np.fromfile(opened, dtype, 1 << 24)):
            yield block


def open_corpus(folder: str | Path) -> Corpus:
    """Open a corpus written by :func:`write_corpus`, and check its index and the sizes of files.

    Args:
        folder: The folder.

    Returns:
        The corpus; tokens are read when they are needed.

    Raises:
        InputError: If it is missing, unfinished or damaged.
    """
    folder = user_path(folder, "corpus")
    if not (folder / INDEX).is_file():
        unfinished = (folder / UNFINISHED).is_file()
        raise InputError(
            f"the corpus {folder} is unfinished: run the command that makes it again to go on"
            if unfinished
            else f"no corpus in {folder}: {INDEX} is missing; make one with "
            f"stateline data SOURCE --out {folder}"
        )
    index = _read(folder / INDEX)
    if index.get("format") != FORMAT or index.get("version") != VERSION:
        raise InputError(
            f"{folder / INDEX} must be of the format {FORMAT}, version {VERSION}, got "
            f"{index.get('format')!r}, version {index.get('version')!r}: make the corpus again"
        )
    return Corpus(folder, index)


def _documents(path: Path, shard: ShardEntry) -> ShardDocuments:
    described = parse(_read(path), ShardDocuments, path)
    try:
        described.check(shard)
    except ValueError as error:
        raise damaged(path, error) from error
    return described


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, "corpus file")
    except InputError as error:
        raise InputError(f"{error}; {REPAIR}") from error


def _check_size(path: Path, wanted: int) -> None:
    found = path.stat().st_size if path.is_file() else None
    if found != wanted:
        state = "is missing" if found is None else f"has {found} bytes"
        raise InputError(f"{path} must have {wanted} bytes, but {state}: {REPAIR}")
