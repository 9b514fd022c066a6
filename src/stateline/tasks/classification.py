"""Classification of sequences that lie on disk: what all such tasks share."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from stateline.errors import InputError
from stateline.models.classifier import ClassifierConfig
from stateline.tasks.base import IGNORE, Batch, Task, epoch_rows

HeldOut = Literal["test", "valid"]
T = TypeVar("T")


class Rows(NamedTuple):
    """One part of a data set.

    Attributes:
        inputs: A sequence per row: tokens (length) or numbers (length, channels).
        labels: The class of each row.
    """

    inputs: list[np.ndarray]
    labels: list[int]


class ClassificationTask(Task):
    """Tell the class of a whole sequence; scored on all held-out rows.

    Each row has one target, its class, at its last position. Shorter rows of a batch are filled up
    with zeros behind that, where no causal model sees them before it has answered. Every row is
    trained on once an epoch, in an order that the seed and the epoch fix.

    Each of them reads files that the user has, and says in ``layout`` how they must lie.

    Args:
        seed: Fixes the order.
        batch_size: Rows in a training batch.
        training: Rows to train on.
        held_out: Rows to score.
        classes: Names of the classes.
        vocab_size: Number of tokens; 1 where rows are numbers.

    Raises:
        InputError: If there are fewer rows to train on than in a batch, or none to score.

    Attributes:
        name: As in ``TASKS``.
        layout: What is read, in a few words, for messages.
        n_channels: Numbers at a position; 0 where rows are tokens.
    """

    name: ClassVar[str]
    layout: ClassVar[str]
    metric = "accuracy"
    training: ClassVar[Mapping[str, float | str]] = {
        "steps": 1000,
        "lr": 4e-3,
        "schedule": "cosine",
        "eval_every": 250,
    }

    def __init__(
        self,
        seed: int,
        batch_size: int,
        *,
        training: Rows,
        held_out: Rows,
        classes: Sequence[str],
        vocab_size: int = 1,
    ) -> None:
        if not 1 <= batch_size <= len(training.inputs) or not held_out.inputs:
            raise InputError(
                f"the task {self.name} must find batch_size={batch_size} rows or more to train on "
                f"and 1 to score, got {len(training.inputs)} and "
                f"{len(held_out.inputs)}: it reads {self.layout}"
            )
        self.seed, self.batch_size, self.vocab_size = seed, batch_size, vocab_size
        self.training_rows, self.held_out_rows, self.classes = training, held_out, tuple(classes)
        first = training.inputs[0]
        self.n_channels = first.shape[1] if first.ndim == 2 else 0
        self.train_length = max(map(len, [*training.inputs, *held_out.inputs]))
        self.eval_lengths = (self.train_length,)

    @classmethod
    def find(cls, path: str) -> Path:
        """The path that was given, if something is there.

        Raises:
            InputError: If nothing was given, or nothing is there.
        """
        found = Path(path).expanduser()
        if not path or not found.exists():
            got = f"got {path!r}, where there is nothing" if path else "got no path"
            raise InputError(
                f"the task {cls.name} reads {cls.layout}: name it in {cls.name}(path=...), {got}"
            )
        return found

    @classmethod
    def read(cls, path: Path, reader: Callable[[Path], T]) -> T:
        """What a function makes of a file or folder.

        Raises:
            InputError: If it cannot be read, or is not what the function expects.
        """
        try:
            return reader(path)
        except (OSError, EOFError, LookupError, TypeError, ValueError) as error:
            raise InputError(
                f"the task {cls.name} cannot read {path}: {error or type(error).__name__}; it "
                f"reads {cls.layout}"
            ) from error

    def model_config(self, pattern: str, settings: Mapping[str, Any]) -> ClassifierConfig:
        """A classifier of its input and classes."""
        skipped = {"tie_embeddings"} | ({"pooling"} if settings.get("pooling") is None else set())
        given = {name: value for name, value in settings.items() if name not in skipped}
        return ClassifierConfig(
            pattern,
            self.vocab_size,
            n_channels=self.n_channels,
            n_classes=len(self.classes),
            **given,
        )

    def train_batch(self, index: int) -> Batch:
        """Training batch number ``index``; what is left over in an epoch is passed over."""
        rows = self.training_rows
        return _batch(rows, epoch_rows(self.seed, len(rows.inputs), self.batch_size, index))

    def held_out(self) -> Iterator[Batch]:
        """All held-out rows once, the shortest first, so that little has to be filled up."""
        rows = self.held_out_rows
        order = np.argsort([len(row) for row in rows.inputs], kind="stable")
        for start in range(0, len(order), self.batch_size):
            yield _batch(rows, order[start : start + self.batch_size])

    def describe(self) -> Mapping[str, object]:
        """Sizes and classes, and the hash of all rows."""
        digest = hashlib.sha256()
        for rows in (self.training_rows, self.held_out_rows):
            for row, label in zip(rows.inputs, rows.labels, strict=True):
                digest.update(b"%d\0%d\0" % (label, row.size) + row.tobytes())
        return {
            "training_rows": len(self.training_rows.inputs),
            "held_out_rows": len(self.held_out_rows.inputs),
            "longest": self.train_length,
            "numbers_at_a_position": self.n_channels,
            "classes": self.classes,
            "sha256": digest.hexdigest(),
        }


def _batch(rows: Rows, which: np.ndarray) -> Batch:
    """The rows side by side, filled up with zeros to the longest."""
    inputs = [rows.inputs[row] for row in which]
    shape = (len(inputs), max(map(len, inputs)))
    x = np.zeros((*shape, *inputs[0].shape[1:]), inputs[0].dtype)
    targets = np.full(shape, IGNORE)
    for row, (values, label) in enumerate(zip(inputs, which, strict=True)):
        x[row, : len(values)] = values
        targets[row, len(values) - 1] = rows.labels[label]
    return Batch(torch.from_numpy(x), torch.from_numpy(targets))


def in_frames(training: Rows, held_out: Rows, frame: int) -> tuple[Rows, Rows]:
    """Rows of numbers, scaled alike, with ``frame`` of them at each position.

    Scaled by the mean and the deviation of all numbers that are trained on. The last position is
    filled up with zeros. A linear map of a frame is a convolution with stride ``frame``: shorter
    sequences for coarser time.

    Raises:
        InputError: If ``frame`` is not positive.

    Example:
        >>> rows = Rows([np.array([0.0, 2.0, 2.0, 0.0])], [1])
        >>> in_frames(rows, Rows([np.array([0.0, 1.0, 3.0])], [0]), 2)[1].inputs[0].tolist()
        [[-1.0, 0.0], [2.0, 0.0]]
    """
    if frame < 1:
        raise InputError(f"frame must be at least 1 number at a position, got {frame}")
    numbers = np.concatenate(training.inputs or [np.zeros(1)])
    mean, deviation = numbers.mean(dtype=np.float64), numbers.std(dtype=np.float64) or 1.0

    def cut(row: np.ndarray) -> np.ndarray:
        scaled = (row - mean) / deviation
        return np.pad(scaled, (0, -len(row) % frame)).reshape(-1, frame).astype(np.float32)

    whole, scored = ([cut(row) for row in rows.inputs] for rows in (training, held_out))
    return Rows(whole, training.labels), Rows(scored, held_out.labels)
