"""Multi-query recall: many pairs of a key and a value, and a query for each."""

from dataclasses import dataclass

import numpy as np
import torch

from stateline.errors import InputError
from stateline.settings import Count
from stateline.tasks.base import IGNORE, Batch, LabelledTask, train_settings

FILLER = 0


@dataclass(eq=False, kw_only=True)
class MultiQueryRecall(LabelledTask):
    """Read a list of pairs, then give the value of every key, in random order.

    .. code-block:: text

        row  := pair{length // 4} (key | ".")*      every key once, in random places
        pair := key value

    The number of pairs grows with the length of the row: half of the row is pairs. In the other
    half about every second token is a key, and the target there is its value. The keys of a row
    are distinct; values are drawn with replacement.

    "." has the id 0, followed by ``n_keys`` keys and ``n_values`` values.

    Args:
        n_keys: Number of different keys; at least a quarter of the longest row.
        n_values: Number of different values.
        **options: See :class:`~stateline.tasks.LabelledTask`.

    Example:
        >>> tokens, targets = MultiQueryRecall(n_keys=9, n_values=9, length=8).train_batch(0)
        >>> tokens[0]
        tensor([ 3, 16,  6, 17,  3,  0,  6,  0])
        >>> targets[0]
        tensor([-100, -100, -100, -100,   16, -100,   17, -100])

    References:
        Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", ICLR
        2024, whose task this follows. Differs from its code: the places of the keys are uniform,
        the number of pairs grows with the length, values may repeat, and "." stands where it draws
        any token by default.
    """

    title = "Multi-query recall"
    about = (
        "Shows how many pairs a model can hold: the score falls where they no longer fit into its "
        "state. Attention holds all pairs. Guessing is right once in n_values answers."
    )
    training = train_settings(steps=3000, lr=2e-3, schedule="linear", eval_every=100, stop_at=0.999)

    times = (1, 2, 4, 8)
    n_keys: Count = 64
    n_values: Count = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self.least_row, self.vocab_size = self.n_keys, 1 + self.n_keys + self.n_values
        self._n_pairs(self.length)
        self.eval_lengths = tuple(n for n in self.eval_lengths if n // 4 <= self.n_keys)

    def _n_pairs(self, length: int) -> int:
        if not 1 <= length // 4 <= self.n_keys:
            raise InputError(
                "length must be at least 4, and a quarter of it at most n_keys, so that keys "
                f"differ, got length={length} and n_keys={self.n_keys}"
            )
        return length // 4

    def draw(self, rng: np.random.Generator, count: int, length: int, *, training: bool) -> Batch:  # noqa: ARG002
        """Draw rows of ``length`` tokens with ``length // 4`` pairs."""
        n_pairs = self._n_pairs(length)
        every_key = np.broadcast_to(1 + np.arange(self.n_keys), (count, self.n_keys))
        keys = rng.permuted(every_key, axis=1)[:, :n_pairs]
        values = 1 + self.n_keys + rng.integers(self.n_values, size=keys.shape)
        pairs = np.stack([keys, values], axis=2).reshape(count, -1)

        rest = length - 2 * n_pairs
        places = rng.permuted(np.broadcast_to(np.arange(rest), (count, rest)), axis=1)[:, :n_pairs]
        queries, answers = np.full((count, rest), FILLER), np.full((count, rest), IGNORE)
        np.put_along_axis(queries, places, keys, axis=1)
        np.put_along_axis(answers, places, values, axis=1)
        tokens = np.concatenate([pairs, queries], axis=1)
        targets = np.concatenate([np.full_like(pairs, IGNORE), answers], axis=1)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets))
