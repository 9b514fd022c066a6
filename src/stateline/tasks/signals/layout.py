"""Finding the sequences of a data set, their targets and their split in the user's files."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stateline.data.folder import list_folder
from stateline.data.splits import held_out_by_hash
from stateline.tasks.signals.tables import (
    SUFFIXES,
    Columns,
    check_finite,
    read_arrays,
    read_columns,
    stacked,
    to_numbers,
)

PARTS = ("train", "valid", "test")
TABLES = ("labels.csv", "labels.parquet")
MAX_FILES = 1_000_000
ARRAY = "it must have an array"


class SignalExample(NamedTuple):
    """One sequence.

    Attributes:
        name: Where it comes from; decides whether it is held out.
        part: The part of the data set it belongs to; empty if the data name none.
        x: Numbers (length, channels).
        y: A label, an array of values, or an array (length) or (length, values) if ``each``.
        each: Whether every position has a target.
    """

    name: str
    part: str
    x: np.ndarray
    y: Any
    each: bool


class Wanted(NamedTuple):
    """Which columns or arrays hold the targets and the inputs.

    Attributes:
        target: Names of the columns with targets; ``("next",)`` for the next position's input.
        columns: Names of the columns with inputs; empty for all others.
    """

    target: tuple[str, ...]
    columns: tuple[str, ...]


def read_examples(path: Path, wanted: Wanted) -> list[SignalExample]:
    """Read a data set in any of the layouts; a ValueError names a file that fits none."""
    if path.is_file():
        return list(_table_of_rows(path, wanted, ""))
    parts = {part: path / part for part in PARTS if (path / part).is_dir()}
    named = ((part, path / f"{part}{suffix}") for part in PARTS for suffix in reversed(SUFFIXES))
    files = {part: file for part, file in named if file.is_file()}
    if parts:
        return [e for part, folder in parts.items() for e in _folder(folder, wanted, part)]
    if not files:
        return _folder(path, wanted, "")
    return [
        example
        for part, file in files.items()
        for example in _located(file, _table_of_rows(file, wanted, part))
    ]


def split_examples(
    examples: Sequence[SignalExample], scored: str, share: float
) -> tuple[list[SignalExample], list[SignalExample]]:
    """Examples to train on and to score: by their parts, or a share if none names its part."""
    if any(example.part for example in examples):
        training = [example for example in examples if example.part == "train"]
        return training, [example for example in examples if example.part == scored]
    chosen = set(held_out_by_hash([example.name for example in examples], share))
    training = [e for number, e in enumerate(examples) if number not in chosen]
    return training, [examples[number] for number in sorted(chosen)]


def _folder(folder: Path, wanted: Wanted, part: str) -> list[SignalExample]:
    """One file per sequence: with a table of labels, in a folder per class, or with targets."""
    table = next((folder / name for name in TABLES if (folder / name).is_file()), None)
    if table is not None:
        return _located(table, _labelled_files(folder, table, wanted, part))
    names = [name for name in list_folder(folder) if name.endswith(SUFFIXES)]
    if len(names) > MAX_FILES:
        raise ValueError(f"it must have at most {MAX_FILES:,} files, got {len(names):,}")
    in_classes = wanted.target == ("label",) and all("/" in name for name in names)
    return [
        _sequence(folder, name, wanted, part, name.split("/")[0] if in_classes else None)
        for name in names
    ]


def _located(path: Path, examples: Iterator[SignalExample]) -> list[SignalExample]:
    """The examples; an error in reading them names the file."""
    try:
        return list(examples)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def _labelled_files(
    folder: Path, table: Path, wanted: Wanted, part: str
) -> Iterator[SignalExample]:
    columns = read_columns(table)
    for name in ("file", *wanted.target):
        _part(columns, name, f"{table.name} must have a column")
    parts = columns.get("split", [part] * len(columns["file"]))
    for row, (name, own) in enumerate(zip(columns["file"], parts, strict=True)):
        label = _target_of_row(columns, wanted.target, row)
        yield _sequence(folder, str(name), wanted, own or part, label)


def _target_of_row(columns: Columns, target: Sequence[str], row: int) -> Any:
    values = [columns[name][row] for name in target]
    if any(value is None or value == "" for value in values):
        raise ValueError(f"row {row + 1} has no {' or '.join(target)}")
    return values[0] if len(values) == 1 else values


def _sequence(folder: Path, name: str, wanted: Wanted, part: str, label: Any) -> SignalExample:
    """A file with one sequence; its targets are in it unless a label is given."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        raise ValueError(f"{name!r} must be a regular file in the folder")
    try:
        x, y = _arrays(path, wanted, label is None)
        if x.ndim == 1:
            x = x[:, None]
        if x.ndim != 2 or not x.size:
            raise ValueError(f"a sequence must be (length, channels), got {x.shape}")
        if wanted.target == ("next",) and label is None:
            if len(x) < 2:
                raise ValueError("a sequence needs two positions to predict the next one")
            x, y = x[:-1], x[1:]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if label is not None:
        return SignalExample(f"{folder.name}/{name}", part, x, label, each=False)
    return SignalExample(f"{folder.name}/{name}", part, x, y, each=y.ndim > 0 and len(y) == len(x))


def _arrays(path: Path, wanted: Wanted, with_target: bool) -> tuple[np.ndarray, Any]:
    with_target = with_target and wanted.target != ("next",)
    if path.suffix in (".npy", ".npz"):
        arrays = read_arrays(path)
        x = check_finite(_part(arrays, "x", ARRAY), "x")
        return x, _part(arrays, "y", ARRAY) if with_target else None
    columns = read_columns(path)
    targets = wanted.target if with_target else ()
    x = stacked([to_numbers(columns[c], c) for c in _inputs(columns, wanted, targets)])
    if not targets:
        return x, None
    return x, stacked([np.array(_part(columns, name)) for name in targets])


def _inputs(columns: Columns, wanted: Wanted, targets: Sequence[str]) -> list[str]:
    names = list(wanted.columns) or [n for n in columns if n not in (*targets, "split")]
    for name in names:
        _part(columns, name)
    if not names:
        raise ValueError("it must have at least one column of inputs")
    return names


def _part(parts: Mapping[str, Any], name: str, wanted: str = "it must have a column") -> Any:
    if name not in parts:
        raise ValueError(f"{wanted} {name!r}, got {', '.join(parts) or 'none'}")
    return parts[name]


def _table_of_rows(path: Path, wanted: Wanted, part: str) -> Iterator[SignalExample]:
    """One file with all sequences: a row each."""
    if path.suffix in (".npy", ".npz"):
        yield from _rows_of_arrays(path, wanted, part)
    elif path.suffix in (".csv", ".parquet"):
        yield from _rows_of_columns(path, wanted, part)
    else:
        raise ValueError(f"its name must end in {', '.join(SUFFIXES)}")


def _rows_of_arrays(path: Path, wanted: Wanted, part: str) -> Iterator[SignalExample]:
    arrays = read_arrays(path)
    x = check_finite(_part(arrays, "x", ARRAY), "x")
    x = x[:, :, None] if x.ndim == 2 else x
    following = wanted.target == ("next",)
    if x.ndim != 3 or not x.size or (following and x.shape[1] < 2):
        raise ValueError(f"x must be (rows, length, channels) or (rows, length), got {x.shape}")
    y = x[:, 1:] if following else _part(arrays, "y", ARRAY)
    x = x[:, :-1] if following else x
    parts = arrays.get("split", np.full(len(x), part))
    if not y.ndim or not parts.ndim or not len(x) == len(y) == len(parts):
        raise ValueError(f"x, y and split must have as many rows, got {x.shape} and {y.shape}")
    each = y.ndim > 1 and y.shape[1] == x.shape[1]
    for row in range(len(x)):
        yield SignalExample(f"{path.name}:{row}", str(parts[row]), x[row], y[row], each)


def _rows_of_columns(path: Path, wanted: Wanted, part: str) -> Iterator[SignalExample]:
    columns = read_columns(path)
    following = wanted.target == ("next",)
    targets = () if following else wanted.target
    for name in targets:
        _part(columns, name)
    names = _inputs(columns, wanted, targets)
    parts = columns.get("split", [part] * len(columns[names[0]]))
    for row, own in enumerate(parts):
        x = _row_of_columns(columns, names, row)
        if following and len(x) < 2:
            raise ValueError(f"row {row + 1} needs two positions to predict the next one")
        y = x[1:] if following else _target_of_row(columns, targets, row)
        x = x[:-1] if following else x
        yield SignalExample(f"{path.name}:{row}", own or part, x, y, each=following)


def _row_of_columns(columns: Columns, names: Sequence[str], row: int) -> np.ndarray:
    """Each column of numbers is a position; each column of lists is a channel."""
    cells = [columns[name][row] for name in names]
    if not isinstance(cells[0], list):
        return to_numbers(cells, f"row {row + 1}")[:, None]
    lengths = {len(cell) if isinstance(cell, list) else -1 for cell in cells}
    if len(lengths) > 1 or not cells[0]:
        raise ValueError(f"row {row + 1} must have lists of one length, got {sorted(lengths)}")
    return stacked([to_numbers(cell, name) for cell, name in zip(cells, names, strict=True)])
