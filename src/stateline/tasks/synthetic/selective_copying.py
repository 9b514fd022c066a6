"""Selective copying: repeat the data tokens among noise, in order."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from stateline.errors import InputError
from stateline.settings import Count, within
from stateline.tasks.base import IGNORE, Batch, LabelledTask

NOISE = 0


@dataclass(eq=False, kw_only=True)
class SelectiveCopying(LabelledTask):
    """Read data tokens that are scattered among noise, then give them in order.

    .. code-block:: text

        row := (data | ".")*  "=>"{n_data}      n_data data tokens, in random places before "=>"

    The target at each "=>" is the next data token; earlier answers are not among the inputs, so
    the model has to count. Longer rows have more noise, and as many data tokens.

    Of the V token ids, 0 is the noise ".", 1 to ``V - 2`` are data tokens, and ``V - 1`` is "=>".

    Args:
        vocab_size: V.
        n_data: Number of data tokens in a row.
        **options: See :class:`~stateline.tasks.LabelledTask`. In the paper, sequences have 4,096
            tokens with 16 of data, and V is 16.

    Example:
        >>> tokens, targets = SelectiveCopying(length=8, n_data=2).train_batch(0)
        >>> tokens[0]
        tensor([ 0, 14,  0,  0,  0, 13, 15, 15])
        >>> targets[0]
        tensor([-100, -100, -100, -100, -100, -100,   14,   13])

    References:
        Gu and Dao, "Mamba", COLM 2024, section 4.1.1 and table 1; Jing et al., "Gated Orthogonal
        Recurrent Units: On Learning to Forget", Neural Computation 2019, its denoising task.
    """

    title = "Selective copying"
    about = (
        "Shows whether a model can choose by content what enters its state: the distances between "
        "data tokens vary, so a filter that is the same at all times cannot copy them. Guessing is "
        "right once in vocab_size - 2 answers."
    )

    vocab_size: Annotated[int, within(3)] = 16
    n_data: Count = 8
    length: Count = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self._before(self.length)

    def _before(self, length: int) -> int:
        """Tokens before the first mark."""
        if length < 2 * self.n_data:
            raise InputError(
                "length must be at least 2 * n_data, for data tokens and as many marks, got "
                f"length={length} and n_data={self.n_data}"
            )
        return length - self.n_data

    def draw(self, rng: np.random.Generator, count: int, length: int, *, training: bool) -> Batch:  # noqa: ARG002
        """Draw rows of ``length`` tokens."""
        before = self._before(length)
        places = rng.permuted(np.broadcast_to(np.arange(before), (count, before)), axis=1)
        places = np.sort(places[:, : self.n_data], axis=1)
        data = rng.integers(1, self.vocab_size - 1, size=places.shape)
        tokens = np.full((count, length), self.vocab_size - 1)
        tokens[:, :before] = NOISE
        np.put_along_axis(tokens, places, data, axis=1)
        targets = np.full_like(tokens, IGNORE)
        targets[:, before:] = data
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets))
