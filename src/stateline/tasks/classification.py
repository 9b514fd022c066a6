"""Base class of tasks that classify sequences on disk."""

from collections.abc import Mapping, Sequence

import numpy as np

from stateline.settings import at_least
from stateline.tasks.objective import Classes, ClassMetric, Ranked
from stateline.tasks.rows import HeldOut, Rows, RowsTask

__all__ = ["ClassificationTask", "HeldOut", "Rows", "in_frames"]


class ClassificationTask(RowsTask):
    """Predict the class of a whole sequence; scored on all held-out rows.

    Args:
        seed: Fixes the order.
        batch_size: Rows in a training batch.
        training: Rows to train on.
        held_out: Rows to score.
        classes: Names of the classes.
        vocab_size: Number of tokens; 1 if rows are numbers.
        metric: ``accuracy``, or ``auroc`` for two classes.

    Raises:
        InputError: If there are fewer training rows than in a batch, no rows to score, or not two
            classes for ``auroc``.
    """

    metric = "accuracy"

    def __init__(
        self,
        seed: int,
        batch_size: int,
        *,
        training: Rows,
        held_out: Rows,
        classes: Sequence[str],
        vocab_size: int = 1,
        metric: ClassMetric = "accuracy",
    ) -> None:
        super().__init__(
            seed,
            batch_size,
            training=training,
            held_out=held_out,
            objective=(Ranked if metric == "auroc" else Classes)(classes),
            vocab_size=vocab_size,
        )
        self.classes = tuple(classes)

    def describe(self) -> Mapping[str, object]:
        """Sizes and classes, and the hash of all rows."""
        return {**super().describe(), "classes": self.classes}


def in_frames(training: Rows, held_out: Rows, frame: int) -> tuple[Rows, Rows]:
    """Group normalised numbers into frames of ``frame`` numbers, one frame per position.

    Numbers are normalised by the mean and standard deviation of all training rows. The last
    position is padded with zeros. A linear map of a frame is a convolution with stride ``frame``:
    it makes sequences shorter and time coarser.

    Raises:
        InputError: If ``frame`` is not positive.

    Example:
        >>> rows = Rows([np.array([0.0, 2.0, 2.0, 0.0])], [1])
        >>> in_frames(rows, Rows([np.array([0.0, 1.0, 3.0])], [0]), 2)[1].inputs[0].tolist()
        [[-1.0, 0.0], [2.0, 0.0]]
    """
    at_least(1, frame=frame)
    numbers = np.concatenate(training.inputs or [np.zeros(1)])
    mean, deviation = numbers.mean(dtype=np.float64), numbers.std(dtype=np.float64) or 1.0

    def cut(row: np.ndarray) -> np.ndarray:
        scaled = (row - mean) / deviation
        return np.pad(scaled, (0, -len(row) % frame)).reshape(-1, frame).astype(np.float32)

    whole, scored = ([cut(row) for row in rows.inputs] for rows in (training, held_out))
    return Rows(whole, training.labels), Rows(scored, held_out.labels)
