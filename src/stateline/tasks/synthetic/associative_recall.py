"""Associative recall: give the value that was paired with a key."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from stateline.errors import InputError
from stateline.settings import Count
from stateline.tasks.base import ExampleTask

_MAX_KEYS = 65_536

DOT = 0
"""The answer for an absent key."""


@dataclass(eq=False, kw_only=True)
class AssociativeRecall(ExampleTask):
    """Read pairs of a key and a value, then give the value of one of the keys.

    .. code-block:: text

        example := pair{length // (key_length + 1)} "=>" pair
        pair    := key value
        key     := key_token{key_length}

    Each example draws a new table that assigns a value to every key; several keys may have the
    same value. The keys of the pairs are drawn uniformly with replacement. The key of the last pair
    is drawn uniformly from the distinct keys that are present, and its value is the answer. With
    ``allow_dot`` it is drawn uniformly from all keys, and the answer for an absent key is ".".

    Of the V token ids, 0 is ".", the next ``V/2 - 1`` are key tokens, the ``V/2 - 1`` after them
    are value tokens, and ``V - 1`` is "=>".

    Args:
        vocab_size: V, even. The default, 4 keys and 4 values, is the setting of the paper.
        key_length: Tokens in a key.
        allow_dot: Whether the last key may be absent from the pairs.
        **options: See :class:`~stateline.tasks.ExampleTask`.

    Example:
        >>> prompts, answers = AssociativeRecall().problems(length=8, index=0)
        >>> prompts[0], answers[0]  # 4 pairs, "=>", key; value
        (tensor([3, 7, 1, 7, 2, 5, 3, 7, 9, 1]), tensor([7]))

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 3.1 and table 2; the semantics
        follow ``ICLDataModule`` in HazyResearch/safari, whose training set is fixed.
    """

    title = "Associative recall"
    about = (
        "Shows whether a model can compare keys and retrieve a value at all. It does not show how "
        "much a model can hold: a table of 4 keys fits the state of an LSTM, which solves it too. "
        "Guessing the most common value, whatever the key, already scores 0.5 (4 keys, 4 values)."
    )
    solved_at = 0.97

    vocab_size: int = 10
    length: Count = 20
    key_length: Count = 1
    allow_dot: bool = False

    def __post_init__(self) -> None:
        size, key_length = self.vocab_size, self.key_length
        if size < 4 or size % 2:
            raise InputError(
                "vocab_size must be even and at least 4, for two special tokens and as many key "
                f"as value tokens, got vocab_size={size}"
            )
        self.n_key_tokens = size // 2 - 1
        self.n_keys = self.n_key_tokens ** min(key_length, 17)  # larger tables are refused anyway
        if self.n_keys > _MAX_KEYS:
            raise InputError(
                f"an example can have a table of {_MAX_KEYS} keys at most, which "
                f"vocab_size={size} and key_length={key_length} exceed: lower one of them"
            )
        self.least_row = self.n_keys
        self._n_pairs(self.length)
        super().__post_init__()

    def _n_pairs(self, length: int) -> int:
        if length <= self.key_length:
            raise InputError(
                f"length must hold at least one pair of {self.key_length + 1} tokens, "
                f"got length={length}"
            )
        return length // (self.key_length + 1)

    def chance(self, batches: int = 8) -> float:
        """Share of right answers if a model gives the most common value of the prompt.

        If one answer to everything is right more often, such as "." for absent keys, its share.
        """
        drawn = [self.problems(self.train_length, index) for index in range(batches)]
        prompts, answers = (torch.cat(own) for own in zip(*drawn, strict=True))
        values = prompts[:, self.key_length : -self.key_length : self.key_length + 1]
        common = values.mode(dim=1, keepdim=True).values
        return max((common == answers).float().mean().item(), super().chance(batches))

    def draw(self, rng: np.random.Generator, count: int, length: int) -> Int[Tensor, "count total"]:
        """Pairs, the mark, a key and its value."""
        n_pairs = self._n_pairs(length)
        table = rng.integers(self.n_key_tokens, size=(count, self.n_keys))  # key -> value
        keys = rng.integers(self.n_keys, size=(count, n_pairs))
        present = np.zeros(table.shape, dtype=bool)
        np.put_along_axis(present, keys, True, axis=1)
        may_ask = present | self.allow_dot
        query = np.where(may_ask, rng.random(table.shape), -1).argmax(axis=1, keepdims=True)
        absent = ~np.take_along_axis(present, query, axis=1)[:, 0]

        keys = np.concatenate([keys, query], axis=1)
        values = np.take_along_axis(table, keys, axis=1)[..., None]
        digits = keys[..., None] // self.n_key_tokens ** np.arange(self.key_length)
        pairs = np.concatenate(
            [1 + digits % self.n_key_tokens, 1 + self.n_key_tokens + values], axis=2
        )  # (count, n_pairs + 1, key_length + 1)
        prefix_at = n_pairs * (self.key_length + 1)
        tokens = np.insert(pairs.reshape(count, -1), prefix_at, self.vocab_size - 1, axis=1)
        tokens[absent, -1] = DOT
        return torch.from_numpy(tokens)
