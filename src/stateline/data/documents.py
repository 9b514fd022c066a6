"""Documents: each has a name and a size, and can be read again in another process."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stateline.errors import InputError

Newlines = Literal["unify", "keep"]
_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(ABC):
    """One text of a corpus.

    Attributes:
        name: Path below its source; decides whether the document is held out.
        path: Full path of its file.
        size: Bytes of the whole text in UTF-8.
        begin: Byte where the document begins in that text.
        end: Byte where it ends; ``None`` means the end of the text.
    """

    name: str
    path: str
    size: int
    begin: int = 0
    end: int | None = None

    @abstractmethod
    def contents(self) -> bytes:
        """The whole text in UTF-8."""

    def text(self, newlines: Newlines) -> str:
        r"""The document as a string; bytes that are not UTF-8 are kept by ``surrogateescape``.

        Args:
            newlines: ``"unify"`` turns ``\r\n`` into ``\n`` and drops a byte order mark.
        """
        text = self.contents()[self.begin : self.end].decode(errors="surrogateescape")
        if newlines == "keep":
            return text
        return text.removeprefix(_BYTE_ORDER_MARK).replace("\r\n", "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDocument(Document):
    """A whole file."""

    def contents(self) -> bytes:
        """The bytes of the file."""
        return Path(self.path).read_bytes()


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

    def contents(self) -> bytes:
        """The field of the line."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return field_of_line(file.readline(), self.key, f"{self.path}, line {self.line},")


def field_of_line(line: bytes, key: str, place: str) -> bytes:
    """The text in a line of JSON.

    Args:
        line: The line.
        key: Name of the field with the text.
        place: Name of the line, for messages.

    Raises:
        InputError: If the line is not JSON, or has no text in that field.
    """
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not JSON: {error}; correct it or leave it out") from error
    return field_of_row(row, key, place)


def field_of_row(row: Any, key: str, place: str) -> bytes:
    """The text in a row.

    Raises:
        InputError: If there is none.
    """
    wanted = f"{place} must have text in the field {key!r}"
    if not isinstance(row, dict):
        raise InputError(f"{wanted}, but it has no fields: {row!r:.40}; correct it or leave it out")
    if key not in row:
        known = ", ".join(map(repr, row)) or "none"
        raise InputError(
            f"{wanted}, but it has {known}: name the field of the text with --text_key"
        )
    text = row[key]
    if not isinstance(text, str):
        raise InputError(f"{wanted}, but it has {text!r:.40} there: name another with --text_key")
    return text.encode(errors="surrogatepass")
