"""Where documents come from: files, folders, rows of JSON, saved data sets."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from stateline.data.documents import Document, FileDocument, LineDocument, field_of_line
from stateline.data.folder import is_text, list_folder
from stateline.data.saved_dataset import is_saved_dataset, rows, split_folder
from stateline.errors import InputError

_BLOCK = 1 << 20


class Sources(NamedTuple):
    """All documents in their order, and name and SHA-256 of each file that was read."""

    documents: tuple[Document, ...]
    files: tuple[tuple[str, str], ...]


def read_sources(sources: Sequence[Path], text_key: str, split_name: str) -> Sources:
    """Find all documents, and read each file once for its hash.

    A file is a document, a line of a file ``*.jsonl`` is one, and so is a row of a saved data set.
    Of a folder all files count but hidden ones, empty ones and binary ones (a zero byte in the
    first kilobyte). Empty lines and rows are passed over too.

    Args:
        sources: Files and folders.
        text_key: The field that holds the text of a row.
        split_name: Which data set is read where several were saved together.

    Raises:
        InputError: If a source cannot be read, has no text, or is given twice.
    """
    documents: list[Document] = []
    files: dict[Path, tuple[str, str]] = {}
    for source in (source.expanduser().resolve() for source in sources):
        before = len(documents)
        try:
            for path, name in _files(source, split_name):
                if path in files:
                    raise InputError(f"{path} is given twice: leave out one of the sources")
                found = tuple(_documents(path, name, text_key)) if _counts(path, source) else ()
                if found:
                    documents += found
                    files[path] = (name, _sha256(path))
        except OSError as error:
            raise InputError(
                f"cannot read the source {str(error.filename or source)!r}: "
                f"{error.strerror or error}; correct it, or make it readable"
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


def _counts(path: Path, source: Path) -> bool:
    """Whether there is something in a file, and if nobody named it, whether that is text."""
    if path.is_dir():
        return True
    with path.open("rb") as file:
        beginning = file.read(1024)
    return bool(beginning) if path == source else is_text(beginning)


def _documents(path: Path, name: str, text_key: str) -> Iterator[Document]:
    if path.is_dir():
        yield from (row for row in rows(path, name, text_key) if row.size)
    elif path.suffix == ".jsonl":
        yield from (line for line in _lines(path, name, text_key) if line.size)
    else:
        yield FileDocument(name=name, path=str(path), size=path.stat().st_size)


def _lines(path: Path, name: str, text_key: str) -> Iterator[LineDocument]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                size = len(field_of_line(line, text_key, f"{path}, line {number},"))
                yield LineDocument(
                    name=f"{name}:{number}",
                    path=str(path),
                    size=size,
                    line=number,
                    offset=offset,
                    key=text_key,
                )
            offset += len(line)


def _sha256(path: Path) -> str:
    """Hash of a file, or of all files of a saved data set."""
    digest = hashlib.sha256()
    for part in sorted(path.iterdir()) if path.is_dir() else [path]:
        with part.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()
