"""Signals: predict classes or values for sequences in the user's files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stateline.errors import InputError
from stateline.settings import Between, Count, Size
from stateline.tasks.objective import Classes, Loss, Objective, Values
from stateline.tasks.rows import HeldOut, Rows, RowsTask
from stateline.tasks.signals.layout import (
    PARTS,
    SignalExample,
    Wanted,
    read_examples,
    split_examples,
)
from stateline.tasks.signals.tables import (
    LARGEST,
    check_finite,
    exact,
    number,
    refuse_infinite,
    to_float32,
)

LOST = 2.0**-10
"""Share of the range of a channel that rounding to float32 may change without normalisation."""


class Signals(RowsTask):
    """Predict a class or values for sequences of numbers in files of your own.

    The page "Tasks" of the manual shows the layouts. In short:

    - One file with a sequence per row. CSV and Parquet: ``target`` names the column with the
      target, the others are positions; in Parquet, columns of lists are channels. NumPy (``.npz``):
      ``x`` (rows, length, channels), ``y`` (rows), (rows, values) or (rows, length, values).
    - A folder with a file per sequence: rows are positions, columns are channels. The targets are
      in a table ``labels.csv`` with a column ``file``; or the name of the folder is the class; or
      every position has a target, in the column ``target`` or the array ``y``.

    With ``target=next`` the target at each position is the next position's input.

    Folders or files named ``train``, ``valid`` and ``test``, or a column or array ``split``, define
    the split. Without these, a share is held out by the hash of the names.

    Args:
        target: Name of the column with the target, ``"a,b"`` for several, or ``next``.
        loss: ``cross_entropy`` for classes, ``l1`` or ``l2`` for values.
        columns: Names of the columns with inputs, as ``"a,b"``; by default all others.
        normalise: Whether inputs, and target values, are normalised by the mean and standard
            deviation of each channel in the training rows. Scores are in the original unit. Without
            it, numbers that float32 would round by a thousandth of their range are refused.
        share: Share of the sequences to hold out if the data have no split.
        **options: See :class:`~stateline.tasks.RowsTask`.
    """

    name = "signals"
    layout = (
        "sequences in .npy, .npz, .csv or .parquet files: one file with a sequence per row, or a "
        "folder with a file per sequence and a table labels.csv, or with a folder per class"
    )
    title = "Signals"
    about = (
        "Files of your own. Scores compare only between runs on the same files and the same split."
    )

    def __init__(  # noqa: PLR0913
        self,
        seed: Size = 0,
        *,
        path: str = "",
        target: str = "label",
        loss: Loss = "cross_entropy",
        columns: str = "",
        normalise: bool = True,
        held_out: HeldOut = "test",
        share: Between = 0.2,
        batch_size: Count = 16,
    ) -> None:
        self.wanted, self.loss_name = Wanted(_names(target), _names(columns)), loss
        if not self.wanted.target:
            raise InputError("target must name a column, or be next, got nothing")
        self.forecasts = self.wanted.target == ("next",)
        self.normalise, self.share = normalise, share
        super().__init__(seed, path=path, batch_size=batch_size, held_out=held_out)

    def load(self, path: Path) -> tuple[Rows, Rows, Objective]:
        """Read all sequences, and keep two parts."""
        examples = self.read(path, lambda place: _checked(read_examples(place, self.wanted)))
        training, scored = split_examples(examples, self.held_out, self.share)
        both = [*training, *scored]
        objective, labels = self.read(
            path, lambda _: _objective(training, both, self.loss_name, self.normalise)
        )
        inputs = self.read(path, lambda _: _inputs(training, both, self.normalise))
        count = len(training)
        training_rows = Rows(inputs[:count], labels[:count])
        return training_rows, Rows(inputs[count:], labels[count:]), objective


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _checked(examples: Sequence[SignalExample]) -> list[SignalExample]:
    """Examples that fit together."""
    for example in examples:
        if example.x.shape[1] != examples[0].x.shape[1]:
            raise ValueError(
                "all sequences must have the same number of channels, got "
                f"{examples[0].x.shape[1]} in {examples[0].name} and "
                f"{example.x.shape[1]} in {example.name}"
            )
        if example.each != examples[0].each:
            raise ValueError(
                "either all sequences or none must have a target at every position, but "
                f"{examples[0].name} and {example.name} differ"
            )
        if example.part not in ("", *PARTS) or bool(example.part) != bool(examples[0].part):
            raise ValueError(
                f"split must be train, valid or test for every row, got {example.part!r} for "
                f"{example.name}"
            )
    if len(examples) < 2:
        raise ValueError(f"it must have at least two sequences, got {len(examples)}")
    return list(examples)


class _Scale:
    """Mean and standard deviation of each channel, and the map that normalises by them.

    Whole numbers are exact: the first one is subtracted before they become float64. If there are
    others, too, it is rounded to a whole number that float64 has.
    """

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        kinds = {part.dtype.kind for part in parts}
        if kinds == {"f"}:
            self.first = np.zeros_like(parts[0][0])
        elif kinds <= {*"iu"}:
            self.first = parts[0][0].astype(np.int64)
        else:
            first = np.trunc(parts[0][0].astype(np.float64))
            self.first = np.where(np.abs(first) < LARGEST, first, 0.0)
        moved, count = [self._from_first(part) for part in parts], sum(map(len, parts))
        varies = np.any([(part != moved[0][0]).any(axis=0) for part in moved], axis=0)
        with np.errstate(over="ignore"):
            self._mean = sum(part.sum(axis=0, dtype=np.float64) for part in moved) / count
            square = sum(((part - self._mean) ** 2).sum(axis=0) for part in moved) / count
        refuse_infinite(square, "the variances of the channels")
        self.mean, self.deviation = self.first + self._mean, np.where(varies, np.sqrt(square), 1.0)

    def __call__(self, numbers: np.ndarray, what: str) -> np.ndarray:
        """The normalised numbers."""
        return to_float32((self._from_first(numbers) - self._mean) / self.deviation, what)

    def _from_first(self, numbers: np.ndarray) -> np.ndarray:
        if numbers.dtype.kind == "f":
            return numbers - self.first
        first = self.first.astype(np.int64)
        if numbers.dtype.kind == "O":
            return (numbers - first.astype(object)).astype(np.float64)
        return numbers.astype(np.int64) - first


def _inputs(
    training: Sequence[SignalExample], examples: Sequence[SignalExample], normalise: bool
) -> list[np.ndarray]:
    parts, names = [each.x for each in examples], [f"x of {each.name}" for each in examples]
    if not (normalise and training):
        return _as_they_are(parts, names)
    scale = _Scale([example.x for example in training])
    return [scale(part, name) for part, name in zip(parts, names, strict=True)]


def _as_they_are(parts: Sequence[np.ndarray], names: Sequence[str]) -> list[np.ndarray]:
    """The numbers in float32, which must keep the differences between them."""
    found = [to_float32(part, name) for part, name in zip(parts, names, strict=True)]
    rows = [np.atleast_2d(part) for part in parts]
    low, high = (
        np.array([end(part, axis=0) for part in rows], np.float64) for end in (np.min, np.max)
    )
    spread = high.max(axis=0) - low.min(axis=0)
    for part, rounded, name in zip(rows, found, names, strict=True):
        lost = np.abs(part - np.atleast_2d(rounded).astype(np.float64)).max(axis=0)
        if (lost > LOST * spread).any():
            raise ValueError(
                f"{name} needs more digits than float32 has: it would be rounded by "
                f"{lost.max():.2g}, and all values of a channel lie within {spread.max():.2g}: "
                "normalise, or subtract a constant"
            )
    return found


def _objective(
    training: Sequence[SignalExample],
    examples: Sequence[SignalExample],
    loss: Loss,
    normalise: bool,
) -> tuple[Objective, list[Any]]:
    """The objective, and the label of each example."""
    if loss == "cross_entropy":
        return _classes(examples)
    labels = [_values(example) for example in examples]
    width = labels[0].shape[-1]
    for example, label in zip(examples, labels, strict=True):
        if label.shape[-1] != width:
            raise ValueError(f"{example.name} must have {width} values, got {label.shape[-1]}")
    names = [f"the target of {example.name}" for example in examples]
    if not (normalise and training):
        scaled = _as_they_are(labels, names)
        return Values(loss, np.zeros(width), np.ones(width), each=examples[0].each), scaled
    scale = _Scale([np.atleast_2d(label) for label in labels[: len(training)]])
    scaled = [scale(label, name) for label, name in zip(labels, names, strict=True)]
    return Values(loss, scale.mean, scale.deviation, each=examples[0].each), scaled


def _values(example: SignalExample) -> np.ndarray:
    """Target values of a sequence: (values), or (length, values) if each position has some."""
    try:
        of_numpy = isinstance(example.y, np.ndarray | np.generic)
        numbers = np.asarray(example.y, None if of_numpy else object)
        if numbers.dtype.kind not in "iuf":
            values = [number(value) for value in numbers.ravel().tolist()]
            numbers = exact(values).reshape(numbers.shape)
    except (TypeError, ValueError):
        raise ValueError(
            f"the target of {example.name} must be numbers for the loss l1 or l2, got "
            f"{str(example.y)[:40]!r}"
        ) from None
    numbers = check_finite(numbers, f"the target of {example.name}")
    if example.each:
        return numbers.reshape(len(example.x), -1)
    return numbers.reshape(-1)


def _classes(examples: Sequence[SignalExample]) -> tuple[Objective, list[Any]]:
    labels = [np.asarray(example.y) for example in examples]
    for example, label in zip(examples, labels, strict=True):
        if label.dtype.kind == "f" and (label != np.floor(label)).any():
            raise ValueError(
                f"the target of {example.name} must be a class, got {label.reshape(-1)[0]}: for "
                "values give loss=l1 or loss=l2"
            )
        if label.size != (len(example.x) if example.each else 1):
            raise ValueError(f"{example.name} must have one class for each target")
    names = [[_name(value) for value in label.reshape(-1).tolist()] for label in labels]
    known = sorted({name for each in names for name in each}, key=_order)
    if len(known) < 2:
        raise ValueError(f"there must be at least two classes, got {', '.join(known)}")
    number = {name: place for place, name in enumerate(known)}
    places = [np.array([number[name] for name in each]) for each in names]
    if examples[0].each:
        return Classes(known), places
    return Classes(known), [int(place[0]) for place in places]


def _name(value: object) -> str:
    return str(int(value)) if isinstance(value, float) else str(value)


def _order(name: str) -> tuple[bool, float, str]:
    """Sort key: numbers by value, then names alphabetically."""
    return (False, float(name), "") if name.lstrip("-").isdecimal() else (True, 0.0, name)
