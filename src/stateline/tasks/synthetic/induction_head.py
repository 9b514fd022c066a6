"""Induction head: repeat what followed a mark."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from stateline.errors import InputError
from stateline.settings import Count, within
from stateline.tasks.base import ExampleTask


@dataclass(eq=False, kw_only=True)
class InductionHead(ExampleTask):
    """Find a mark in random tokens, and repeat the tokens that follow it.

    .. code-block:: text

        example := noise "=>" answer noise "=>" answer
                   <------ length ------->
        answer  := token{induction_length}

    With ``n_triggers > 1``, half of the examples have one mark, and the others have up to
    ``n_triggers`` marks with the same answer. A mark that would overwrite the answer of another
    one is dropped.

    Of the V token ids, 0 is "." (never used), 1 to ``V - 2`` are ordinary and ``V - 1`` is "=>".

    Args:
        vocab_size: V.
        induction_length: Tokens to repeat.
        n_triggers: Largest number of marks in an example.
        **options: See :class:`~stateline.tasks.ExampleTask`.

    Example:
        >>> prompts, answers = InductionHead().problems(length=8, index=0)
        >>> prompts[0], answers[0]  # "=>" is 19
        (tensor([13, 12, 17,  9, 19, 12,  7, 13, 19]), tensor([12]))

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 3.1 and table 2; the semantics
        follow ``ICLDataModule`` in HazyResearch/safari, whose training set is fixed.
    """

    title = "Induction head"
    about = (
        "Shows whether a model can store the token that follows a mark while other tokens pass. "
        "It has to store a single token, so the score does not show how much it could store."
    )
    solved_at = 0.95

    vocab_size: Annotated[int, within(4)] = 20
    length: Count = 30
    induction_length: Count = 1
    n_triggers: Count = 1

    def __post_init__(self) -> None:
        self.answer_len, self.least_row = self.induction_length, self.n_triggers
        self._n_places(self.length)
        super().__post_init__()

    def _n_places(self, length: int) -> int:
        """Number of positions for a mark; the last one is unused, as in the official code."""
        if length < self.induction_length + 2:
            raise InputError(
                f"length must be at least {self.induction_length + 2}, for a mark, its answer of "
                f"induction_length={self.induction_length} and one token more, got length={length}"
            )
        return length - 1 - self.induction_length

    def draw(self, rng: np.random.Generator, count: int, length: int) -> Int[Tensor, "count total"]:
        """Noise with marks and their answer, the mark and the answer again."""
        marks = rng.integers(self._n_places(length), size=(count, self.n_triggers))
        single = rng.random(count) < 0.5
        marks[single] = marks[single, :1]
        marks.sort(axis=1)

        mark = self.vocab_size - 1
        noise = rng.integers(1, mark, size=(count, length))
        offsets = 1 + np.arange(self.induction_length)
        answers = np.take_along_axis(noise, marks[:, :1] + offsets, axis=1)
        phrases = np.insert(answers, 0, mark, axis=1)
        last = np.full(count, -length)
        for column in marks.T:
            rows = np.flatnonzero(column - last > self.induction_length)
            last[rows] = column[rows]
            noise[rows[:, None], column[rows, None] + np.arange(len(offsets) + 1)] = phrases[rows]
        return torch.from_numpy(np.concatenate([noise, phrases], axis=1))
