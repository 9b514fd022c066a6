"""Duplicated n-grams: copy a string that contains the same n letters twice."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from stateline.errors import InputError
from stateline.tasks.synthetic.copying import CopyTask
from stateline.tasks.synthetic.strings import Examples


@dataclass(eq=False, kw_only=True)
class DuplicateNgram(CopyTask):
    """Train on copying; score on strings that contain the same n letters twice.

    .. code-block:: text

        problem := BOS x SEP        x: n of its letters are replaced by a copy of n others

    Training batches are the batches of ``copying`` with the same settings. The places are drawn
    uniformly from all pairs of places that do not overlap, so every string contains a duplicate. A
    model that looks up the last n letters or fewer finds two places, one of which is wrong.

    Differs from the official code, which replaces every occurrence of one n-gram by another n-gram
    of the string; if the two overlap, no duplicate may remain.

    Args:
        n: Length of the duplicated part; each scored length must be at least 2 n.
        **options: See :class:`~stateline.tasks.StringTask`.

    Example:
        >>> DuplicateNgram(n=3).problems(length=8, index=0).answers[0]
        tensor([17, 19, 10, 20, 17, 17, 19, 10])

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, section 3.4 and figure 4.
    """

    title = "Duplicated n-grams"
    about = (
        "Shows how many of the last letters a model uses to look up the next one: copying fails "
        "where that many letters are duplicated. Meaningless for a model that cannot copy."
    )
    answer_len = None

    n: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_length(self.max_len)

    def _check_length(self, length: int) -> None:
        if self.n < 1 or length < 2 * self.n:
            raise InputError(
                "n must be at least 1, and a string must hold n letters twice without overlap: "
                f"got n={self.n} and a length of {length}"
            )

    def _asked(self, rng: np.random.Generator, lengths: Int[np.ndarray, " row"]) -> Examples:
        length = int(lengths[0])
        self._check_length(length)
        strings = rng.integers(self.n_letters, size=(len(lengths), length))
        # Draw two of length - 2n + 2 places, then move the later one to the right by n - 1.
        spots = np.arange(length - 2 * self.n + 2)
        pairs = rng.permuted(np.broadcast_to(spots, (len(lengths), len(spots))), axis=1)[:, :2]
        source, copy = pairs.T + (self.n - 1) * (pairs.max(axis=1) == pairs.T)
        letters = np.arange(self.n)
        phrase = np.take_along_axis(strings, source[:, None] + letters, axis=1)
        np.put_along_axis(strings, copy[:, None] + letters, phrase, axis=1)
        return self._copies(strings, lengths)
