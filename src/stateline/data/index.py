"""The files that describe a corpus, validated before use."""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from jaxtyping import UInt

from stateline.data.documents import Newlines
from stateline.errors import InputError

FORMAT, VERSION = "stateline-corpus", 1
REPAIR = "repeat the command that made it, which writes what is missing"

Whole = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
TokenDtype = Literal["|u1", "<u2", "<u4"]
SplitName = Literal["train", "held_out", "test"]
T = TypeVar("T")


class TokenHash:
    """SHA-256 of tokens as little-endian numbers of at least two bytes, however they are stored."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, tokens: UInt[np.ndarray, " length"]) -> None:
        """Add tokens."""
        wide = np.promote_types(tokens.dtype, np.uint16).newbyteorder("<")
        self._digest.update(tokens.astype(wide).data)

    def hexdigest(self) -> str:
        """The hash of all tokens."""
        return self._digest.hexdigest()


class ShardEntry(msgspec.Struct, frozen=True):
    """The entry of a shard in the index; sizes are sums over its documents."""

    name: Annotated[str, msgspec.Meta(pattern=r"^(train|held_out|test)-[0-9]{5,9}\Z")]
    documents: Whole
    tokens: Whole
    bytes: Whole
    sha256: Hash
    documents_sha256: Hash


class ShardDocuments(msgspec.Struct, frozen=True):
    """The JSON file of a shard: name, tokens and bytes of each document."""

    plan: str
    sha256: Hash
    names: list[str]
    tokens: list[Whole]
    bytes: list[Whole]

    def check(self, entry: ShardEntry) -> None:
        """Raise ValueError if the sizes differ from those in the index, or tokens have no bytes."""
        if not len(self.names) == len(self.tokens) == len(self.bytes) == entry.documents:
            raise ValueError("the number of documents differs from the number in the index")
        if sum(self.tokens) != entry.tokens or sum(self.bytes) != entry.bytes:
            raise ValueError("its sizes differ from the sizes in the index")
        if entry.tokens and not entry.bytes:
            raise ValueError("it has tokens but no bytes")


class CorpusSettings(msgspec.Struct, frozen=True):
    """The part of the recorded settings that readers use."""

    newlines: Newlines


class Index(msgspec.Struct, frozen=True):
    """The index of a corpus."""

    tokenizer: Hash
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    dtype: TokenDtype
    settings: CorpusSettings
    splits: dict[SplitName, Annotated[list[ShardEntry], msgspec.Meta(min_length=1)]]


def parse(value: Any, kind: type[T], path: Path) -> T:
    """Convert the parsed JSON of a file to a type; an InputError if it does not fit the type."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, reason: object) -> InputError:
    """Error for a damaged file of a corpus."""
    return InputError(f"{path} is damaged: {reason}; {REPAIR}")
