"""Reading numbers from files: NumPy arrays, CSV and Parquet."""

import csv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stateline.errors import InputError

SUFFIXES = (".npy", ".npz", ".csv", ".parquet")

MAX_BYTES = 1 << 34
"""Upper limit on the size of a file, unpacked: 16 GiB."""

Columns = Mapping[str, Sequence[Any]]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a NumPy file by name; that of a ``.npy`` file is called ``x``.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is damaged, too large, or holds Python objects.
    """
    _check_size(path.stat().st_size)
    if path.suffix == ".npy":
        return {"x": _numbers(np.load(path, mmap_mode="r", allow_pickle=False))}
    try:
        with zipfile.ZipFile(path) as archive:
            _check_size(sum(entry.file_size for entry in archive.infolist()))
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except zipfile.BadZipFile as error:
        raise ValueError(f"it is not an .npz file: {error}") from error


def read_columns(path: Path) -> Columns:
    """The columns of a CSV file with a header, or of a Parquet file, by name.

    Values of a CSV file are text.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is damaged or too large, or has rows of different lengths.
        InputError: If it is a Parquet file and pyarrow is not installed.
    """
    _check_size(path.stat().st_size)
    return _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)


def _read_csv(path: Path) -> Columns:
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            rows = [row for row in csv.reader(file, strict=True) if row]
        except csv.Error as error:
            raise ValueError(f"it is not CSV: {error}") from error
    header = [name.strip() for name in rows[0]] if rows else []
    if len(set(header)) < len(header) or not all(header):
        raise ValueError("its first line must have a different name for each column")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} values, and the header {len(header)}")
    return {name: [row[place] for row in rows[1:]] for place, name in enumerate(header)}


def _read_parquet(path: Path) -> Columns:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise InputError(
            "reading Parquet needs pyarrow: install it with pip install 'stateline[data]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            metadata = file.metadata
            groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
            _check_size(sum(group.total_byte_size for group in groups))
            table = file.read()
    except ArrowException as error:
        raise ValueError(f"it is not a Parquet file: {error}") from error
    return {name: table.column(name).to_pylist() for name in table.column_names}


def to_numbers(values: Sequence[Any], name: str) -> np.ndarray:
    """A column as float32.

    Raises:
        ValueError: If a value is missing, not a number, or not finite.
    """
    numbers = np.empty(len(values), np.float32)
    for row, value in enumerate(values, start=1):
        try:
            numbers[row - 1] = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"row {row} of column {name!r} is not a number: {value!r}") from None
    return check_finite(numbers, f"column {name!r}")


def check_finite(numbers: np.ndarray, what: str) -> np.ndarray:
    """The numbers as float32.

    Raises:
        ValueError: If they are not numbers, or one is not finite in float32.
    """
    with np.errstate(over="ignore"):
        values = _numbers(numbers).astype(np.float32)
    if not np.isfinite(values).all():
        place = tuple(int(index) for index in np.argwhere(~np.isfinite(values))[0])
        raise ValueError(f"{what} must be finite, got {values[place]} at {list(place)}")
    return values


def _numbers(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "biuf":
        raise ValueError(f"it must hold real numbers, got an array of {array.dtype}")
    return array


def _check_size(n_bytes: int) -> None:
    if n_bytes > MAX_BYTES:
        raise ValueError(f"it must have at most {MAX_BYTES:,} bytes, unpacked, got {n_bytes:,}")
