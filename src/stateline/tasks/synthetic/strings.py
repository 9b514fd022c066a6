"""Vocabulary, packed rows and scores of the tasks on strings of random letters."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from stateline.errors import InputError
from stateline.settings import Count, Size, at_least, within
from stateline.tasks.base import IGNORE, Batch, GeneratedTask, Problems, generator, train_settings
from stateline.tasks.text.corpus import eval_lengths

Numbers = Int[np.ndarray, "..."]
Piece = tuple[Numbers, Numbers]
"""Tokens along the last axis, and the number of valid tokens in each row."""


class Examples(NamedTuple):
    """Examples from BOS to EOS, padded with PAD, and the lengths of examples and prompts."""

    tokens: Int[np.ndarray, "*examples width"]
    prompts: Int[np.ndarray, "*examples"]
    lengths: Int[np.ndarray, "*examples"]


@dataclass(eq=False, kw_only=True)
class StringTask(GeneratedTask):
    """Base of the tasks on strings of random letters.

    Letters have the ids 0 to ``n_letters - 1``, followed by BOS, SEP, EOS and PAD. PAD never occurs
    in training; with it, the vocabulary equals the vocabulary of the paper's code.

    Training rows are packed: each holds as many complete examples as fit, and the beginning of
    another one. Lengths are uniform from ``min_len`` to ``max_len``. The loss counts the answer and
    EOS of every complete example. Neither attention nor the state is reset between examples; BOS
    marks the beginning of each.

    Args:
        seed: Fixes every batch.
        n_letters: Number of different letters, 1 to 26.
        min_len: Letters in the shortest training string.
        max_len: Letters in the longest training string.
        context_len: Tokens in a training row. Inputs and targets have one token fewer, since the
            first token is not a target and the last is not an input.
        batch_size: Rows in a training batch.
        longest: Score at ``max_len``, at its doublings up to this length, and at this length; by
            default at lengths up to four times ``max_len``.
        teacher_forcing: Predict each letter of the answer from the true letters before it, instead
            of the decoded ones.

    Raises:
        InputError: If a size is out of range, or the longest example does not fit a row.
    """

    metric = "string_accuracy"
    solved_at = 0.95
    training = train_settings(steps=1600, lr=4e-3, schedule="linear")

    seed: Size = field(default=0, kw_only=False)
    n_letters: Annotated[int, within(1, 26)] = 26
    min_len: Count = 3
    max_len: Count = 10
    context_len: Count = 40
    batch_size: Count = 16
    longest: int | None = None
    teacher_forcing: bool = False

    def __post_init__(self) -> None:
        n_letters, longest = self.n_letters, self.max_len
        if self.min_len > longest:
            raise InputError(
                f"min_len must be at most max_len, got min_len={self.min_len} and max_len={longest}"
            )
        self.vocab_size, self.train_length = n_letters + 4, longest
        self.bos, self.sep, self.eos, self.pad = range(n_letters, n_letters + 4)
        near = tuple(sorted({longest * halves // 2 for halves in (2, 3, 4, 6, 8)}))
        self.eval_lengths = near if self.longest is None else eval_lengths(longest, self.longest)
        shortest, longest = self._sizes()
        self._most = 1 + self.context_len // shortest
        """Largest number of examples in a training row, including one that is cut off."""
        self.least_row = max(self.context_len, self._most * longest)
        if self.context_len < longest:
            raise InputError(
                f"context_len must hold the longest example, {longest} tokens, "
                f"got context_len={self.context_len}"
            )

    @abstractmethod
    def _sizes(self) -> tuple[int, int]:
        """Tokens in the shortest and in the longest training example."""

    @abstractmethod
    def _examples(
        self, rng: np.random.Generator, lengths: Int[np.ndarray, "row example"]
    ) -> Examples:
        """Training examples on strings of these lengths."""

    @abstractmethod
    def _asked(self, rng: np.random.Generator, lengths: Int[np.ndarray, " row"]) -> Examples:
        """Evaluation examples, whose prompts have the same length."""

    def train_batch(self, index: int) -> Batch:
        """Training batch number ``index``: rows of ``context_len - 1`` tokens and their targets."""
        rng = generator(self.seed, "train", index)
        shape = (self.batch_size, self._most)
        lengths = rng.integers(self.min_len, self.max_len, size=shape, endpoint=True)
        return pack(self._examples(rng, lengths), self.context_len)

    def problems(self, length: int, index: int) -> Problems:
        """Evaluation batch number ``index``, on strings of ``length`` letters; EOS not scored."""
        at_least(1, length=length)
        rng = generator(self.seed, "eval", length, index)
        tokens, prompts, lengths = self._asked(rng, np.full(self.problems_per_batch, length))
        answers = np.where(np.arange(tokens.shape[1]) < lengths[:, None] - 1, tokens, IGNORE)
        start, stop = int(prompts[0]), int(lengths.max()) - 1
        return Problems(
            torch.from_numpy(tokens[:, :start]), torch.from_numpy(answers[:, start:stop])
        )

    def score(
        self, answers: Int[Tensor, "batch answer"], predictions: Int[Tensor, "batch answer"]
    ) -> dict[str, float]:
        """Share of strings that are completely correct, and share of correct letters.

        Differs from the official code, which predicts each letter from the true letters before it
        (``teacher_forcing`` here). The share of correct strings is the same; the share of correct
        letters is lower here, since letters after an error are often wrong, too.
        """
        asked = answers != IGNORE
        right = (answers == predictions) & asked
        return {
            "string_accuracy": (right | ~asked).all(dim=1).float().mean().item(),
            "character_accuracy": (right.sum(dim=1) / asked.sum(dim=1)).mean().item(),
        }

    def _special(self, token: int, shape: Sequence[int]) -> Piece:
        """A part of one token, the same in every example."""
        return np.full((*shape, 1), token), np.ones(shape, dtype=np.int64)

    def _compose(self, prompt: Sequence[Piece], answer: Piece) -> Examples:
        """BOS, the pieces of the prompt, the answer, EOS."""
        shape = answer[1].shape
        pieces = [self._special(self.bos, shape), *prompt, answer, self._special(self.eos, shape)]
        sizes = np.stack([size for _, size in pieces])
        return Examples(join(pieces, self.pad), sizes[:-2].sum(axis=0), sizes.sum(axis=0))


def join(pieces: Sequence[Piece], pad: int) -> Int[np.ndarray, "*rows width"]:
    """Concatenate parts of different lengths, row by row.

    Example:
        >>> letters = np.array([[1, 2], [3, 4]]), np.array([1, 2])
        >>> join([letters, (np.array([[5], [6]]), np.array([1, 1]))], pad=0)
        array([[1, 5, 0],
               [3, 4, 6]])
    """
    sizes = np.stack([size for _, size in pieces])
    width = int(sizes.sum(axis=0).max())
    joined = np.full((*sizes.shape[1:], width + 1), pad)
    begin = np.zeros(sizes.shape[1:], dtype=np.int64)
    for tokens, size in pieces:
        place = np.arange(tokens.shape[-1])
        # Padding is written to the last place, which is cut off below.
        at = np.where(place < size[..., None], begin[..., None] + place, width)
        np.put_along_axis(joined, at, tokens, axis=-1)
        begin = begin + size
    return joined[..., :width]


def pack(examples: Examples, context_len: int) -> Batch:
    """Pack examples into rows of ``context_len`` tokens, and give the target of each token.

    Args:
        examples: For each row, more examples than fit.
        context_len: Length of the rows. An example that is cut off has no targets.
    """
    ends = np.cumsum(examples.lengths, axis=1)
    position = np.arange(context_len)
    begins = np.zeros((len(ends), context_len + 1), dtype=np.int64)
    np.put_along_axis(begins, np.minimum(ends, context_len), 1, axis=1)
    which = begins[:, :-1].cumsum(axis=1)  # index of the example at each position
    length, prompt, end = (
        np.take_along_axis(per_example, which, axis=1)
        for per_example in (examples.lengths, examples.prompts, ends)
    )
    place = position - end + length  # offset in the example; 0 at BOS
    rows = np.arange(len(which))[:, None]
    tokens = examples.tokens[rows, which, place]
    answered = (place >= prompt) & (end <= context_len)
    targets = np.where(answered, tokens, IGNORE)
    return Batch(torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets[:, 1:]))
