"""Copying: repeat a string."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int

from stateline.settings import Count
from stateline.tasks.base import Problems
from stateline.tasks.synthetic.strings import Examples, Numbers, StringTask


class CopyTask(StringTask):
    """Base class of tasks whose training data are strings to copy.

    The string after SEP repeats the one before it, or its first ``answer_len`` letters.
    """

    answer_len: int | None

    def _sizes(self) -> tuple[int, int]:
        return self._size(self.min_len), self._size(self.max_len)

    def _size(self, letters: int) -> int:
        """Number of tokens in an example, given the letters of its string."""
        return letters + min(letters, self.answer_len or letters) + 3

    def _answered(self, letters: Numbers) -> Numbers:
        return letters if self.answer_len is None else np.minimum(letters, self.answer_len)

    def _examples(
        self, rng: np.random.Generator, lengths: Int[np.ndarray, "row example"]
    ) -> Examples:
        """Draw letters for all positions of a row; letters past the end of a string are unused."""
        letters = rng.integers(self.n_letters, size=(len(lengths), self.context_len))
        whole = lengths + self._answered(lengths) + 3
        begin = np.cumsum(whole, axis=1) - whole
        places = begin[..., None] + 1 + np.arange(self.max_len)
        places = np.minimum(places, self.context_len - 1)
        strings = np.take_along_axis(letters[:, None], places, axis=2)
        return self._copies(strings, lengths)

    def _copies(self, strings: Numbers, lengths: Numbers) -> Examples:
        sep = self._special(self.sep, lengths.shape)
        return self._compose([(strings, lengths), sep], (strings, self._answered(lengths)))


GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(eq=False, kw_only=True)
class Copying(CopyTask):
    """Read a string of random letters and repeat it.

    .. code-block:: text

        example := BOS letter{l} SEP letter{l} EOS      the same letters twice
        row     := example example ... , cut after context_len tokens

    Args:
        answer_len: Letters to repeat; by default all.
        mixed: Score the training length on strings of all training lengths, spread evenly, one
            length per batch, as in the paper's first figure; by default only on strings of
            ``max_len`` letters.
        metric: ``string_accuracy`` or ``character_accuracy``.
        **options: See :class:`~stateline.tasks.StringTask`, which says what rows are.

    Example:
        >>> prompts, answers = Copying().problems(length=3, index=0)
        >>> prompts[0], answers[0]  # BOS is 26, SEP is 27
        (tensor([26,  7, 25, 16, 27]), tensor([ 7, 25, 16]))

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, section 3.
    """

    title = "Copying"
    about = (
        "A state of fixed size can copy only strings that fit into it; attention copies by looking "
        "up the last few letters. Scores beyond the training length measure generalisation only "
        "for models that have solved the training length."
    )

    answer_len: Count | None = None
    mixed: bool = False
    metric: Literal["string_accuracy", "character_accuracy"] = "string_accuracy"

    @property
    def copied_letters(self) -> int:
        """Size of the alphabet, if whole strings of one length are scored."""
        whole = self.metric == "string_accuracy" and self.answer_len is None
        return self.n_letters if whole and not self.mixed else 0

    def problems(self, length: int, index: int) -> Problems:
        """Evaluation batch number ``index``; with ``mixed``, of any training length."""
        if self.mixed and length == self.max_len:
            # Lengths spread evenly, however many batches there are; the longest comes first.
            place = index * GOLDEN_RATIO % 1
            length = self.max_len - int(place * (self.max_len - self.min_len + 1))
        return super().problems(length, index)

    def _asked(self, rng: np.random.Generator, lengths: Int[np.ndarray, " row"]) -> Examples:
        strings = rng.integers(self.n_letters, size=(len(lengths), int(lengths[0])))
        return self._copies(strings, lengths)
