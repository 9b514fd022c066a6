"""Documents of the sources: files, folders, JSON lines, saved data sets."""

import codecs
import gzip
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from stateline.data.documents import (
    Document,
    FileDocument,
    LineDocument,
    field_of_line,
    last_packed,
    size_and_hash,
)
from stateline.data.folder import is_text, list_folder
from stateline.data.parquet_rows import parquet_rows
from stateline.data.saved_dataset import is_saved_dataset, rows, split_folder
from stateline.errors import InputError
from stateline.files import regular_file, sha256, text_file, user_path

_ROWS = (".jsonl", ".jsonl.gz", ".parquet")
"""Ends of names of files with a document in each row."""


class Sources(NamedTuple):
    """All documents in order, and the name and SHA-256 of each file that was read."""

    documents: tuple[Document, ...]
    files: tuple[tuple[str, str], ...]


def read_sources(sources: Sequence[Path], text_key: str, split_name: str) -> Sources:
    """Find all documents, and read each file once for its hash.

    A document is a file, a line of a file ``*.jsonl`` or ``*.jsonl.gz``, or a row of a file
    ``*.parquet`` or of a saved data set. Hidden, empty
    and binary files (a zero byte in the first kilobyte) of a folder are skipped, as are empty lines
    and rows. A file with nothing but a byte order mark is empty. The text of a row is in the field
    ``text_key``.

    Raises:
        InputError: If a source cannot be read, is packed, has no text, or is given twice.
    """
    documents: list[Document] = []
    files: dict[Path, tuple[str, str]] = {}
    for source in (user_path(source, "source").resolve() for source in sources):
        if not source.is_dir():
            (regular_file if source.name.endswith(_ROWS) else text_file)(source, "source")
        before = len(documents)
        try:
            for path, name in _files(source, split_name):
                if path in files:
                    raise InputError(f"{path} is given twice: leave out one of the sources")
                if not _is_used(path, source):
                    continue
                digest = sha256(path) if path.is_file() else _folder_hash(path)
                if found := tuple(_documents(path, name, digest, text_key)):
                    documents += found
                    files[path] = (name, digest)
        except (OSError, EOFError, zlib.error) as error:  # the last two: a damaged packed file
            place = getattr(error, "filename", None) or source
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"cannot read the source {str(place)!r}: {reason}; correct it, or make it readable"
            ) from error
        if len(documents) == before:
            raise InputError(f"found no text in {source}: give a path to a file or folder of text")
    return Sources(tuple(documents), tuple(files.values()))


def _files(source: Path, split_name: str) -> Iterator[tuple[Path, str]]:
    """Path and name of each file of a source; a saved data set counts as a file."""
    if is_saved_dataset(source):
        folder = split_folder(source, split_name)
        yield folder, folder.relative_to(source.parent).as_posix()
    elif source.is_dir():
        for name in list_folder(source):
            yield source / name, f"{source.name}/{name}"
    else:
        yield source, source.name


def _is_used(path: Path, source: Path) -> bool:
    """Whether a file is not empty, and is text or named by the user."""
    if path.is_dir():
        return True
    with path.open("rb") as file:
        beginning = file.read(1024).removeprefix(codecs.BOM_UTF8)
    return bool(beginning) if path == source or path.name.endswith(_ROWS) else is_text(beginning)


def _documents(path: Path, name: str, digest: str, text_key: str) -> Iterator[Document]:
    if path.is_dir():
        yield from (row for row in rows(path, name, text_key) if row.size)
    elif path.name.endswith(_ROWS):
        read = parquet_rows if path.suffix == ".parquet" else _lines
        yield from (row for row in read(path, name, text_key) if row.size)
    else:
        yield FileDocument(name=name, path=str(path), size=path.stat().st_size, sha256=digest)


def _lines(path: Path, name: str, text_key: str) -> Iterator[LineDocument]:
    offset = 0
    last_packed.cache_clear()  # the file may have changed since
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                text = field_of_line(line, text_key, f"{path}, line {number},")
                yield LineDocument(
                    name=f"{name}:{number}",
                    path=str(path),
                    **size_and_hash(text),
                    line=number,
                    offset=offset,
                    key=text_key,
                )
            offset += len(line)


def _folder_hash(folder: Path) -> str:
    """Hash of the names and contents of all files of a saved data set."""
    listing = "\n".join(f"{sha256(part)} {part.name}" for part in sorted(folder.iterdir()))
    return hashlib.sha256(listing.encode()).hexdigest()
