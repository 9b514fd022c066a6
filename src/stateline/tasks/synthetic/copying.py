"""Copying: repeat a string."""

from typing import Literal

import numpy as np
from jaxtyping import Int

from stateline.settings import at_least
from stateline.tasks.base import Problems
from stateline.tasks.synthetic.strings import Examples, Numbers, StringTask


class CopyTask(StringTask):
    """Base class of tasks whose training data are strings to copy.

    The string after SEP repeats the one before it, or its first ``answer_len`` letters.
    """

    answer_len: int | None

    @property
    def _least(self) -> int:
        return self._size(self.min_len)

    def _size(self, letters: int) -> int:
        """Number of tokens in an example, given the letters of its string."""
        return letters + min(letters, self.answer_len or letters) + 3

    def _answered(self, letters: Numbers) -> Numbers:
        return letters if self.answer_len is None else np.minimum(letters, self.answer_len)

    def _examples(
        self, rng: np.random.Generator, lengths: Int[np.ndarray, "row example"]
    ) -> Examples:
        """Draw letters for all places of a row; those past the end of the string are not used."""
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


class Copying(CopyTask):
    """Read a string of random letters and repeat it.

    .. code-block:: text

        example := BOS letter{l} SEP letter{l} EOS      the same letters twice
        row     := example example ... , cut after context_len tokens

    Training rows are packed: each holds as many complete examples as fit, and the beginning of
    another one. The length l of each example is uniform from ``min_len`` to ``max_len``. The loss
    counts the second string and EOS of every complete example. Neither attention nor the state is
    reset between examples; BOS marks the beginning of each.

    Letters have the ids 0 to ``n_letters - 1``, followed by BOS, SEP, EOS and PAD. PAD never
    occurs; it makes the vocabulary equal to the vocabulary of the paper's code.

    Args:
        seed: Fixes every batch.
        n_letters: Number of different letters, 1 to 26.
        min_len: Letters in the shortest training string.
        max_len: Letters in the longest training string.
        context_len: Tokens in a training row. Inputs and targets have one token fewer, since the
            first token is not a target and the last is not an input.
        batch_size: Rows in a training batch.
        answer_len: Letters to repeat; by default all.
        longest: Score at ``max_len``, at its doublings up to this length, and at it; by default at
            lengths up to four times ``max_len``.
        teacher_forcing: Predict each letter of the answer from the true letters before it, instead
            of the decoded ones.
        mixed: Score the training length on strings whose lengths are spread evenly over the
            training's, one length for each batch, as the paper does in its first figure, instead
            of on the longest.
        metric: ``string_accuracy`` or ``character_accuracy``.

    Raises:
        InputError: If a size is out of range, or the longest example does not fit a row.

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

    def __init__(  # noqa: PLR0913
        self,
        seed: int = 0,
        *,
        n_letters: int = 26,
        min_len: int = 3,
        max_len: int = 10,
        context_len: int = 40,
        batch_size: int = 16,
        answer_len: int | None = None,
        longest: int | None = None,
        teacher_forcing: bool = False,
        mixed: bool = False,
        metric: Literal["string_accuracy", "character_accuracy"] = "string_accuracy",
    ) -> None:
        sizes = (n_letters, min_len, max_len, context_len, batch_size, longest)
        super().__init__(seed, *sizes, teacher_forcing)
        at_least(1, answer_len=answer_len)
        self.answer_len, self.mixed, self.metric = answer_len, mixed, metric
        self._check_context(self._size(max_len))

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
