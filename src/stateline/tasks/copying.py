"""Copying: say the string again."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from stateline.errors import InputError
from stateline.tasks.base import IGNORE, Batch, GeneratedTask, Problems, generator


class Copying(GeneratedTask):
    """Read a string of random letters and say it again.

    .. code-block:: text

        example := BOS letter{l} SEP letter{l} EOS      the same letters twice
        row     := example example ... , cut after context_len tokens

    Training rows are packed: as many examples as fit, each with its own l, uniform from
    ``min_len`` to ``max_len``, and the beginning of one more. The loss looks at the second string
    and EOS of every whole example. Attention and state cross from one example to the next, where
    BOS is the only border.

    Letters have the ids 0 to ``n_letters - 1``, then come BOS, SEP, EOS and PAD. PAD never occurs;
    it keeps the vocabulary that of the paper's code.

    Args:
        seed: Fixes every batch.
        n_letters: Number of different letters, 1 to 26.
        min_len: Letters in the shortest training string.
        max_len: Letters in the longest training string.
        context_len: Tokens in a training row. Model and loss see one fewer, since the first
            token is no target and the last no input.
        batch_size: Rows in a training batch.

    Raises:
        InputError: If a size is out of range, or the longest example does not fit a row.

    Example:
        >>> prompts, answers = Copying().problems(length=3, index=0)
        >>> prompts[0], answers[0]  # BOS is 26, SEP is 27
        (tensor([26,  7, 25, 16, 27]), tensor([ 7, 25, 16]))

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, section 4.
    """

    title = "Copying"
    about = (
        "A state of fixed size can copy only strings that fit into it; attention copies by looking "
        "up the last few letters. A score at a length above the training one tells about "
        "generalisation only for a model that has solved the training length."
    )
    metric = "string_accuracy"
    solved_at = 0.95
    training: ClassVar[Mapping[str, float | str]] = {
        "steps": 1600,
        "lr": 4e-3,
        "schedule": "linear",
    }
    problems_per_batch: ClassVar[int] = 64

    def __init__(
        self,
        seed: int = 0,
        *,
        n_letters: int = 26,
        min_len: int = 3,
        max_len: int = 10,
        context_len: int = 40,
        batch_size: int = 16,
    ) -> None:
        if not 1 <= n_letters <= 26:
            raise InputError(f"n_letters must be from 1 to 26, got n_letters={n_letters}")
        if not 1 <= min_len <= max_len:
            raise InputError(
                "min_len must be at least 1 and at most max_len, "
                f"got min_len={min_len} and max_len={max_len}"
            )
        if context_len < 2 * max_len + 3:
            raise InputError(
                "context_len must hold the longest example, 2 * max_len + 3 = "
                f"{2 * max_len + 3} tokens, got context_len={context_len}"
            )
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got batch_size={batch_size}")
        self.seed, self.batch_size = seed, batch_size
        self.n_letters, self.vocab_size = n_letters, n_letters + 4
        self.bos, self.sep, self.eos = n_letters, n_letters + 1, n_letters + 2
        self.min_len, self.max_len, self.context_len = min_len, max_len, context_len
        self.train_length = max_len
        self.eval_lengths = tuple(sorted({max_len * halves // 2 for halves in (2, 3, 4, 6, 8)}))

    def train_batch(self, index: int) -> Batch:
        """Training batch number ``index``: rows of ``context_len - 1`` tokens and their targets."""
        rng = generator(self.seed, "train", index)
        most = 1 + self.context_len // (2 * self.min_len + 3)  # examples that a row can touch
        lengths = rng.integers(
            self.min_len, self.max_len, size=(self.batch_size, most), endpoint=True
        )
        letters = rng.integers(self.n_letters, size=(self.batch_size, self.context_len))

        ends = np.cumsum(2 * lengths + 3, axis=1)
        position = np.arange(self.context_len)
        example = (position[:, None] >= ends[:, None]).sum(axis=2)  # the one each position is in
        length = np.take_along_axis(lengths, example, axis=1)
        end = np.take_along_axis(ends, example, axis=1)
        place = position - end + 2 * length + 3  # 0 at BOS
        # Outside the second strings the index means nothing and may wrap; select passes over it.
        copied = np.take_along_axis(letters, position - length - 1, axis=1)
        tokens = np.select(
            [place == 0, place <= length, place == length + 1, place <= 2 * length + 1],
            [self.bos, letters, self.sep, copied],
            default=self.eos,
        )
        answered = (place > length + 1) & (end <= self.context_len)
        targets = np.where(answered, tokens, IGNORE)
        return Batch(torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets[:, 1:]))

    def problems(self, length: int, index: int) -> Problems:
        """Evaluation batch number ``index``: ``BOS x SEP`` and the ``length`` letters of x."""
        if length < 1:
            raise InputError(f"length must be at least 1 letter, got length={length}")
        rng = generator(self.seed, "eval", length, index)
        letters = rng.integers(self.n_letters, size=(self.problems_per_batch, length))
        prompts = np.pad(letters, [(0, 0), (1, 1)], constant_values=[(0, 0), (self.bos, self.sep)])
        return Problems(torch.from_numpy(prompts), torch.from_numpy(letters))

    def score(
        self, answers: Int[Tensor, "batch answer"], predictions: Int[Tensor, "batch answer"]
    ) -> dict[str, float]:
        """Share of strings that are right as a whole, and share of letters that are right.

        Differs from the official code: it predicts each letter after the true ones, which makes
        no difference to strings and is milder on letters after a mistake.
        """
        right = (answers == predictions).float()
        return {
            "string_accuracy": right.amin(dim=1).mean().item(),
            "character_accuracy": right.mean().item(),
        }
