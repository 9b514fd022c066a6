"""Documents: each has a name and a size, and can be read again in another process."""

import codecs
import gzip
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, ClassVar, Literal

from stateline.errors import InputError

Newlines = Literal["unify", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(ABC):
    """One text of a corpus.

    Attributes:
        name: Path below its source, with the number of the row if it is one.
        path: Full path of its file.
        size: Bytes of the whole text in UTF-8.
        sha256: Hash of that text, which decides whether the document is held out.
        begin: Byte where the document begins in that text.
        end: Byte where it ends; ``None`` means the end of the text.
    """

    name: str
    path: str
    size: int
    sha256: str
    begin: int = 0
    end: int | None = None

    piece_bytes: ClassVar[int] = 1 << 62

    @abstractmethod
    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the whole text in UTF-8, from ``start`` up to, not including, ``stop``."""

    def pieces(self, newlines: Newlines) -> Iterator[str]:
        r"""The document in pieces; bytes that are not UTF-8 are kept by ``surrogateescape``.

        Args:
            newlines: ``"unify"`` turns ``\r\n`` into ``\n`` and drops a byte order mark.
        """
        end = self.size if self.end is None else self.end
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        mark, held = "\ufeff", ""  # a byte order mark, and a \r, which may begin a line end
        for start in range(self.begin, end, self.piece_bytes):
            stop = min(start + self.piece_bytes, end)
            text = held + decoder.decode(self.read(start, stop), final=stop == end)
            held = ""
            if newlines == "unify" and text:
                held = "\r" if text.endswith("\r") and stop < end else ""
                text = text.removeprefix(mark).removesuffix(held).replace("\r\n", "\n")
                mark = ""
            yield text


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDocument(Document):
    """A whole file, which is read in pieces."""

    piece_bytes: ClassVar[int] = 1 << 22

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the file."""
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(stop - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineDocument(Document):
    """The text in one line of a JSON lines file.

    Attributes:
        line: Number of the line, from 1.
        offset: Byte where the line begins.
        key: The field.
    """

    line: int
    offset: int
    key: str

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the field of the line."""
        text = field_of_line(self._line(), self.key, f"{self.path}, line {self.line},")
        return text[start:stop]

    def _line(self) -> bytes:
        if self.path.endswith(".gz"):
            packed = last_packed(self.path)
            packed.seek(self.offset)
            return packed.readline()
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.readline()


last_packed = lru_cache(maxsize=1)(gzip.open)
"""The packed file that was read last; it stays open, since a seek reads all that lies between."""


def field_of_line(line: bytes, key: str, place: str) -> bytes:
    """The text in a field of a line of JSON; messages name the line by ``place``."""
    return field_of_row(row_of_line(line, place), key, place)


def size_and_hash(text: bytes) -> dict[str, Any]:
    """The fields of a document that follow from its text."""
    return {"size": len(text), "sha256": sha256(text).hexdigest()}


def row_of_line(line: bytes, place: str) -> Any:
    """The value of a line of JSON; an InputError if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not JSON: {error}; correct it or leave it out") from error


def field_of_row(row: Any, key: str, place: str, option: str = "--text_key") -> bytes:
    """The text in a field of a row, empty for null; an error tells which ``option`` names it."""
    wanted = f"{place} must have text in the field {key!r}"
    if not isinstance(row, dict):
        raise InputError(f"{wanted}, but it has no fields: {row!r:.40}; correct it or leave it out")
    if key not in row:
        known = ", ".join(map(repr, row)) or "none"
        raise InputError(f"{wanted}, but it has {known}: name the field of the text with {option}")
    text = "" if row[key] is None else row[key]
    if not isinstance(text, str):
        raise InputError(f"{wanted}, but it has {text!r:.40} there: name another with {option}")
    return text.encode(errors="surrogatepass")
