"""Tasks on the rows of a data set that lies on disk."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.settings import Count, Size
from stateline.tasks.base import Batch, Targets, Task, epoch_rows, generator, train_settings
from stateline.tasks.objective import Objective

HeldOut = Literal["test", "valid"]
T = TypeVar("T")


class Rows(NamedTuple):
    """One part of a data set.

    Attributes:
        inputs: A sequence per row: tokens (length) or numbers (length, channels).
        labels: The target of each row: a class, or an array of values; or an array of classes
            (length) or values (length, values), one target for each position.
    """

    inputs: list[np.ndarray]
    labels: list[Any]


@dataclass(eq=False, kw_only=True)
class RowsTask(Task):
    """Predict classes or values for sequences; scored on all held-out rows.

    A row has either one target, at its last position, or a target at every position. The
    shorter rows of a batch are padded with zeros at the end, which causal models read only after
    they have answered; other models get the lengths of the rows. Every row is used once per epoch,
    in an order fixed by the seed.

    The files belong to the user. ``layout`` says how they must be arranged.

    Args:
        seed: Fixes the order.
        path: The file or folder.
        batch_size: Rows in a training batch.
        held_out: The part to score: ``test``, or ``valid`` while choosing settings.

    Raises:
        InputError: If the data at ``path`` are missing, damaged or not arranged as ``layout`` says,
            if there are fewer training rows than in a batch, or no rows to score.

    Attributes:
        name: Name in ``TASKS``.
        layout: What is read, in a few words, for messages.
        vocab_size: Number of tokens; 1 if rows are numbers.
        n_channels: Numbers per position; 0 if rows are tokens.
    """

    name: ClassVar[str]
    layout: ClassVar[str]
    training = train_settings(steps=1000, lr=4e-3, schedule="cosine", eval_every=250)
    metric = "accuracy"
    vocab_size = 1
    seed: Size = field(default=0, kw_only=False)
    path: str = ""
    batch_size: Count = 16
    held_out: HeldOut = "test"

    def __post_init__(self) -> None:
        training, held_out, objective = self.load(self.find(self.path))
        if self.batch_size > len(training.inputs) or not held_out.inputs:
            raise InputError(
                f"the task {self.name} needs at least batch_size={self.batch_size} rows to train "
                f"on and 1 to score, got {len(training.inputs)} and {len(held_out.inputs)}: it "
                f"reads {self.layout}"
            )
        self.training_rows, self.held_out_rows, self.objective = training, held_out, objective
        self.metric, self.higher_is_better = objective.metric, objective.higher_is_better
        self.scores_share = objective.scores_share
        first = training.inputs[0]
        self.n_channels = first.shape[1] if first.ndim == 2 else 0
        self.train_length = max(map(len, [*training.inputs, *held_out.inputs]))
        self.eval_lengths = (self.train_length,)

    @abstractmethod
    def load(self, path: Path) -> tuple[Rows, Rows, Objective]:
        """Rows to train on, rows to score, and the kind of targets."""

    @classmethod
    def find(cls, path: str) -> Path:
        """The given path, if something is there.

        Raises:
            InputError: If no path was given, or nothing can be read there.
        """
        found = Path(path)
        got = "no path"
        try:
            found = found.expanduser()
            exists = bool(path) and found.exists()
            got = f"{path!r}, where there is nothing" if path else got
        except (OSError, RuntimeError, ValueError) as error:  # ~nobody, loops of links, NUL
            exists, got = False, f"{path!r}: {getattr(error, 'strerror', None) or error}"
        if not exists:
            raise InputError(
                f"the task {cls.name} reads {cls.layout}: name it in {cls.name}(path=...), got "
                f"{got}"
            )
        return found

    @classmethod
    def read(cls, path: Path, reader: Callable[[Path], T]) -> T:
        """The result of a function that reads a file or folder.

        Raises:
            InputError: If it cannot be read, or does not hold what the function expects.
        """
        try:
            if not path.is_file() and not path.is_dir():
                raise ValueError("it is not a regular file" if path.exists() else "it is missing")
            return reader(path)
        except Exception as error:  # readers of foreign formats raise many types
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise InputError(
                f"the task {cls.name} cannot read {path}: {reason}; it reads {cls.layout}"
            ) from error

    def model_config(self, pattern: str, settings: Mapping[str, Any]) -> ModelConfig:
        """Configuration of a model with the inputs and outputs of the task."""
        skipped = {"tie_embeddings"} | ({"pooling"} if settings.get("pooling") is None else set())
        given = {name: value for name, value in settings.items() if name not in skipped}
        given |= {"vocab_size": self.vocab_size, "n_channels": self.n_channels}
        return self.objective.model_config(pattern, given)

    def train_batch(self, index: int) -> Batch:
        """Training batch number ``index``; the incomplete last batch of an epoch is skipped."""
        rows = self.training_rows
        which = epoch_rows(self.seed, len(rows.inputs), self.batch_size, index)
        return self._batch(rows, which)

    def scored_batches(self) -> Iterator[Batch]:
        """All held-out rows once, the shortest first, to keep padding short."""
        rows = self.held_out_rows
        order = np.argsort([len(row) for row in rows.inputs], kind="stable")
        for start in range(0, len(order), self.batch_size):
            yield self._batch(rows, order[start : start + self.batch_size])

    def score_names(self) -> set[str]:
        """The scores of the objective."""
        return {*self.objective.scores}

    def problems_scored(self, batches: int) -> int:  # noqa: ARG002
        """All held-out rows."""
        return len(self.held_out_rows.inputs)

    def hold_out_validation(self) -> str:
        """Hold out a tenth of the training rows, the same for every seed, and score only these."""
        rows = self.training_rows
        count = max(1, len(rows.inputs) // 10)
        if len(rows.inputs) - count < self.batch_size:
            raise InputError(
                f"choosing settings on the task {self.name} needs {self.batch_size + 1} training "
                f"rows, one of them to hold out, got {len(rows.inputs)}: lower batch_size or use "
                "the protocol quick"
            )
        order = generator(0, "validation").permutation(len(rows.inputs))
        self.held_out_rows, self.training_rows = (
            Rows([rows.inputs[row] for row in part], [rows.labels[row] for row in part])
            for part in (np.sort(order[:count]), np.sort(order[count:]))
        )
        return f"{count:,} of {len(order):,} training rows, held out from training"

    def asked(self, targets: Targets) -> Tensor:
        """Which targets count in the loss."""
        return self.objective.asked(targets)

    def loss(self, outputs: Float[Tensor, "batch length outputs"], targets: Targets) -> Tensor:
        """Training loss of the objective, summed over the targets that count."""
        return self.objective.loss(outputs, targets)

    def describe(self) -> Mapping[str, object]:
        """Sizes, the hash of all rows, and classes or the number of values."""
        digest = hashlib.sha256()
        for rows in (self.training_rows, self.held_out_rows):
            for row, label in zip(rows.inputs, rows.labels, strict=True):
                target = label.tobytes() if isinstance(label, np.ndarray) else b"%d" % label
                digest.update(target + b"\0%d\0" % row.size + row.tobytes())
        return {
            "training_rows": len(self.training_rows.inputs),
            "held_out_rows": len(self.held_out_rows.inputs),
            "longest": self.train_length,
            "numbers_at_a_position": self.n_channels,
            "sha256": digest.hexdigest(),
            **self.objective.describe(),
        }

    def _batch(self, rows: Rows, which: np.ndarray) -> Batch:
        """Rows side by side, padded with zeros to the longest."""
        inputs = [rows.inputs[row] for row in which]
        shape = (len(inputs), max(map(len, inputs)))
        x = np.zeros((*shape, *inputs[0].shape[1:]), inputs[0].dtype)
        targets = self.objective.no_targets(*shape)
        for place, (values, row) in enumerate(zip(inputs, which, strict=True)):
            x[place, : len(values)] = values
            label = np.asarray(rows.labels[row])
            each = label.ndim == targets.ndim - 1
            targets[place, slice(0, len(values)) if each else len(values) - 1] = label
        return Batch(torch.from_numpy(x), torch.from_numpy(targets))


def in_frames(training: Rows, held_out: Rows, frame: int) -> tuple[Rows, Rows]:
    """Group normalised numbers into frames of ``frame`` numbers, one frame per position.

    Numbers are normalised by the mean and standard deviation of all training rows. The last
    position is padded with zeros. A linear map of a frame is a convolution with stride ``frame``:
    it makes sequences shorter and time coarser.

    Example:
        >>> rows = Rows([np.array([0.0, 2.0, 2.0, 0.0])], [1])
        >>> in_frames(rows, Rows([np.array([0.0, 1.0, 3.0])], [0]), 2)[1].inputs[0].tolist()
        [[-1.0, 0.0], [2.0, 0.0]]
    """
    numbers = np.concatenate(training.inputs or [np.zeros(1)])
    mean, deviation = numbers.mean(dtype=np.float64), numbers.std(dtype=np.float64) or 1.0

    def cut(row: np.ndarray) -> np.ndarray:
        scaled = (row - mean) / deviation
        return np.pad(scaled, (0, -len(row) % frame)).reshape(-1, frame).astype(np.float32)

    whole, scored = ([cut(row) for row in rows.inputs] for rows in (training, held_out))
    return Rows(whole, training.labels), Rows(scored, held_out.labels)
