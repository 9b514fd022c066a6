"""Folders of ``Dataset.save_to_disk``; the only file that imports the package ``datasets``."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from stateline.data.documents import Document, field_of_row, size_and_hash
from stateline.errors import InputError, needed

_ONE, _SEVERAL = "state.json", "dataset_dict.json"


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` of a data set, or of a dictionary of them, wrote a folder."""
    return (folder / _SEVERAL).is_file() or (
        (folder / _ONE).is_file() and (folder / "dataset_info.json").is_file()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDocument(Document):
    """A field of a row of a data set.

    Attributes:
        row: Number of the row, from 0.
        key: The field.
    """

    row: int
    key: str

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the field of the row."""
        place = f"{self.path}, row {self.row},"
        return field_of_row(_row(self.path, self.row), self.key, place)[start:stop]


def split_folder(folder: Path, split: str) -> Path:
    """The folder of one split, which must be there, or the folder itself if it has no splits."""
    if not (folder / _SEVERAL).is_file():
        return folder
    if not is_saved_dataset(folder / split):
        known = ", ".join(sorted(path.parent.name for path in folder.glob(f"*/{_ONE}"))) or "none"
        raise InputError(
            f"the data set {folder} has no split {split!r}, it has {known}: name one with "
            "--split_name"
        )
    return folder / split


def rows(folder: Path, name: str, key: str) -> Iterator[RowDocument]:
    """A document for each row of the data set of this name, whose text is in the field ``key``."""
    path = str(folder)
    _open.cache_clear()  # the files may have changed since
    for number in range(len(_open(path))):
        text = field_of_row(_row(path, number), key, f"{path}, row {number},")
        yield RowDocument(
            name=f"{name}:{number}",
            path=path,
            **size_and_hash(text),
            row=number,
            key=key,
        )


def _row(folder: str, number: int) -> Any:
    try:
        return _open(folder)[number]
    except InputError:
        raise
    except Exception as error:  # pyarrow raises many types for damaged files
        raise _damaged(folder, error) from error


@lru_cache(maxsize=4)
def _open(folder: str) -> Any:
    datasets = needed("datasets", f"the data set {folder}", "data")
    try:
        return datasets.load_from_disk(folder)
    except Exception as error:  # its readers raise many types
        raise _damaged(folder, error) from error


def _damaged(folder: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return InputError(f"the data set {folder} is damaged: {reason}; save it again")
