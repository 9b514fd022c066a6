"""Memorization: facts that only the weights can hold."""

from dataclasses import dataclass

import numpy as np
import torch

from stateline.settings import Count
from stateline.tasks.base import IGNORE, Batch, LabelledTask, generator, train_settings


@dataclass(eq=False, kw_only=True)
class Memorization(LabelledTask):
    """Give the value of each key, which is the same in all rows and never among the inputs.

    .. code-block:: text

        row := (key "?")*        the target at "?" is the value of the key before it

    Every key has a value of its own. The same ``n_keys`` gives the same values with every seed.

    Keys come first, then "?", then values.

    Args:
        n_keys: Number of keys, and of values.
        **options: See :class:`~stateline.tasks.LabelledTask`.

    Example:
        >>> tokens, targets = Memorization(n_keys=4, length=8).train_batch(0)
        >>> tokens[0]
        tensor([1, 4, 3, 4, 3, 4, 1, 4])
        >>> targets[0]
        tensor([-100,    8, -100,    5, -100,    5, -100,    8])

    References:
        Poli et al., "Mechanistic Design and Scaling of Hybrid Architectures", ICML 2024, section 3,
        with 256 training rows. Differs from its code: rows are drawn anew for every batch.
    """

    title = "Memorization"
    about = (
        "Shows how many facts the weights hold after a training: the layers need not read earlier "
        "tokens but the last. Guessing is right once in n_keys answers."
    )
    training = train_settings(LabelledTask, lr=1e-3)

    shortest = 2
    times = (1,)
    n_keys: Count = 127

    def __post_init__(self) -> None:
        super().__post_init__()
        self.least_row, self.vocab_size = self.n_keys, 2 * self.n_keys + 1
        self._values = 1 + self.n_keys + generator(0, "memorization").permutation(self.n_keys)

    def draw(self, rng: np.random.Generator, count: int, length: int, *, training: bool) -> Batch:  # noqa: ARG002
        """Draw rows of ``length`` tokens."""
        tokens = np.full((count, length), self.n_keys)
        keys = tokens[:, ::2]
        keys[:] = rng.integers(self.n_keys, size=keys.shape)
        targets = np.full_like(tokens, IGNORE)
        targets[:, 1::2] = self._values[keys[:, : length // 2]]
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets))
