"""Reading numbers from files: NumPy arrays, CSV and Parquet.

Files that cannot be read raise OSError; damaged, too large or malformed ones raise ValueError.
"""

import csv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from stateline.errors import needed
from stateline.settings import INT64
from stateline.workers import memory_bytes

SUFFIXES = (".npy", ".npz", ".csv", ".parquet")

MAX_BYTES = memory_bytes() // 4
"""Upper limit on what a file takes in memory, unpacked; about as much is needed to work on it."""

_VALUE = 32
"""Bytes that a value of a column takes at least, as an object of Python."""

LARGEST = 2**62
"""Whole numbers below it are exact: their differences fit into 64 bits."""

FLOATS = 2**53
"""Whole numbers up to it are exact in float64."""

Columns = Mapping[str, Sequence[Any]]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a NumPy file by name; the array of a ``.npy`` file has the name ``x``."""
    check_size(path.stat().st_size)
    if path.suffix == ".npy":
        return {"x": _numbers(np.load(path, mmap_mode="r", allow_pickle=False))}
    try:
        with zipfile.ZipFile(path) as archive:
            check_size(sum(entry.file_size for entry in archive.infolist()))
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except zipfile.BadZipFile as error:
        raise ValueError(f"it is not an .npz file: {error}") from error


def read_columns(path: Path) -> Columns:
    """The columns of a CSV file with a header (texts), or of a Parquet file, by name."""
    check_size(path.stat().st_size)
    return _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)


def _read_csv(path: Path) -> Columns:
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            rows = [row for row in csv.reader(file, strict=True) if row]
        except csv.Error as error:
            raise ValueError(f"it is not CSV: {error}") from error
    header = [name.strip() for name in rows[0]] if rows else []
    _check_names(header)
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} values, and the header {len(header)}")
    return {name: [row[place] for row in rows[1:]] for place, name in enumerate(header)}


def _read_parquet(path: Path) -> Columns:
    needed("pyarrow", "reading Parquet", "data")
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            chunks = _chunks(file.metadata)
            check_size(sum(max(c.total_uncompressed_size, c.num_values * _VALUE) for c in chunks))
            names, n_bytes = file.schema_arrow.names, 0
            _check_names(names)
            columns: dict[str, list[Any]] = {name: [] for name in names}
            for batch in file.iter_batches(1024):  # the metadata counts a repeated value once
                for name, column in zip(names, map(_decoded, batch.columns), strict=True):
                    check_size(n_bytes := n_bytes + column.nbytes)
                    columns[name] += column.to_pylist()
    except ArrowException as error:
        raise ValueError(f"it is not a Parquet file: {error}") from error
    return columns


def _check_names(header: Sequence[str]) -> None:
    if len(set(header)) < len(header) or not all(header):
        raise ValueError("it must have a different name for each column")


def _chunks(metadata: Any) -> Iterator[Any]:
    """Metadata of each part of each column of a Parquet file."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        yield from (group.column(place) for place in range(group.num_columns))


def _decoded(column: Any) -> Any:
    """A column with its values in place of indices into a dictionary."""
    return column.dictionary_decode() if hasattr(column, "dictionary_decode") else column


def to_numbers(values: Sequence[Any], name: str) -> np.ndarray:
    """A column of finite numbers, see :func:`exact`."""
    numbers = []
    for row, value in enumerate(values, start=1):
        try:
            numbers.append(number(value))
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"row {row} of column {name!r} is not a number: {value!r}") from None
    return check_finite(exact(numbers), f"column {name!r}")


def exact(numbers: Sequence[int | float]) -> np.ndarray:
    """Whole numbers, or float64; objects of Python where float64 would round whole numbers."""
    if all(isinstance(n, int) and n in INT64 for n in numbers):
        return np.array(numbers, np.int64)
    rounded = any(isinstance(n, int) and FLOATS < abs(n) < LARGEST for n in numbers)
    return np.array(numbers, object if rounded else np.float64)


def stacked(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Columns side by side, as :func:`exact` gives numbers."""
    mixed = len({column.dtype.kind for column in columns}) > 1
    if mixed and any(c.dtype.kind in "iu" and (np.abs(c) > FLOATS).any() for c in columns):
        columns = [column.astype(object) for column in columns]
    return np.stack(columns, axis=1)


def number(value: Any) -> int | float:
    """Text or an object as a number that is not rounded, if it is whole."""
    if isinstance(value, str | int):
        with suppress(ValueError):
            return int(value)
    return float(value)


def check_finite(numbers: np.ndarray, what: str) -> np.ndarray:
    """The numbers, which must be finite, not rounded: see :func:`exact`, or float32."""
    if numbers.dtype.kind == "O":
        refuse_infinite(numbers.astype(np.float64), what)
        return numbers
    values = _numbers(numbers)
    whole = values.dtype.kind in "iu"
    huge = whole and values.size and max(int(values.max()), -int(values.min())) >= LARGEST
    if huge or not whole:
        with np.errstate(over="ignore"):
            values = values.astype(np.float32 if values.dtype.itemsize < 8 else np.float64)
    refuse_infinite(values, what)
    return values


def to_float32(numbers: np.ndarray, what: str) -> np.ndarray:
    """The numbers as models read them, in which they must be finite."""
    with np.errstate(over="ignore"):
        values = numbers.astype(np.float32)
    refuse_infinite(values, what)
    return values


def refuse_infinite(values: np.ndarray, what: str) -> None:
    """Raise ValueError if a number is not finite."""
    if not np.isfinite(values).all():
        place = tuple(int(index) for index in np.argwhere(~np.isfinite(values))[0])
        raise ValueError(f"{what} must be finite, got {values[place]} at {list(place)}")


def _numbers(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "biuf":
        raise ValueError(f"it must hold real numbers, got an array of {array.dtype}")
    return array


def check_size(n_bytes: int) -> None:
    """Refuse a size above a quarter of this machine's memory, before the data are read."""
    if n_bytes > MAX_BYTES:
        raise ValueError(
            f"unpacked it would take {n_bytes:,} bytes, and may take {MAX_BYTES:,}, a quarter of "
            "this machine's memory: divide it into several files, or use fewer rows"
        )
