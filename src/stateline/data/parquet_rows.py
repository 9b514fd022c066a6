"""Documents in Parquet files: the rows of one column, read a row group at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from stateline.data.documents import Document, field_of_row, size_and_hash
from stateline.errors import InputError, needed


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetDocument(Document):
    """A field of a row of a Parquet file.

    Attributes:
        group: Number of the row group, from 0.
        row: Number of the row in its group, from 0.
        key: The field.
    """

    group: int
    row: int
    key: str

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the field of the row."""
        row = {self.key: _column(self.path, self.key, self.group)[self.row].as_py()}
        return field_of_row(row, self.key, f"{self.name} in {self.path}")[start:stop]


def parquet_rows(file: Path, name: str, key: str) -> Iterator[ParquetDocument]:
    """A document for each row of the file of this name, whose text is in the column ``key``."""
    path, number = str(file), 0
    _column.cache_clear()  # the file may have changed since
    with _open(path) as opened:
        names, groups = opened.schema_arrow.names, opened.num_row_groups
    field_of_row(dict.fromkeys(names, ""), key, path)  # refuses a file without the column
    for group in range(groups):
        for row, value in enumerate(_column(path, key, group)):
            text = field_of_row({key: value.as_py()}, key, f"{path}, row {number},")
            yield ParquetDocument(
                name=f"{name}:{number}",
                path=path,
                **size_and_hash(text),
                group=group,
                row=row,
                key=key,
            )
            number += 1


@lru_cache(maxsize=1)
def _column(path: str, key: str, group: int) -> Any:
    with _open(path) as file:
        try:
            return file.read_row_group(group, columns=[key]).column(key)
        except Exception as error:  # pyarrow raises many types for damaged files
            raise _damaged(path, error) from error


def _open(path: str) -> Any:
    needed("pyarrow", f"the file {path}", "data")
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except Exception as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return InputError(f"the Parquet file {path} is damaged: {reason}; get it again")
