"""In-context recall: give the value of every key that was seen before, also among noise."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.settings import Count, Fraction, within
from stateline.tasks.base import IGNORE, Batch, LabelledTask, train_settings

_MAX_KEYS = 65_536


@dataclass(eq=False, kw_only=True)
class InContextRecall(LabelledTask):
    """Read pairs of a key and a value, and give the value whenever a key comes again.

    .. code-block:: text

        row   := (pair | noise)*         cut at the length of the row
        pair  := key value               a key keeps its value within a row
        key   := key_token{1, key_length}
        value := value_token{1, value_length}
        noise := noise_token*            as long as a pair

    Sizes and tokens of keys are uniform. Near its end, every row has the key of an earlier pair, so
    it asks for a value. Rows to score have keys of the greatest length alone; their targets are the
    values of keys that were seen before. Rows to train on have the next token as target everywhere.

    Key tokens come first, then value tokens, then noise tokens.

    Args:
        n_keys: Number of key tokens, at least 2.
        n_values: Number of value tokens.
        key_length: Most tokens of a key; more than one makes recall fuzzy.
        value_length: Most tokens of a value.
        noise: Share of pairs that are noise instead.
        n_noise: Number of noise tokens.
        **options: See :class:`~stateline.tasks.LabelledTask`.

    Example:
        >>> tokens, targets = InContextRecall(n_keys=2, n_values=2, length=8).labelled(8, 0)
        >>> tokens[0]
        tensor([1, 3, 0, 3, 1, 3, 0, 3])
        >>> targets[0]
        tensor([-100, -100, -100, -100,    3, -100,    3, -100])

    References:
        Poli et al., "Mechanistic Design and Scaling of Hybrid Architectures", ICML 2024, section 3:
        in-context recall (the defaults), noisy recall (``noise=0.2``) and fuzzy recall
        (``n_keys=7, key_length=3, value_length=3``), all with 12,800 training rows. Differs from
        its code: rows are drawn anew for every batch, a key or value may have a token twice, and a
        row is cut where that code fills it up in front.
    """

    title = "In-context recall"
    about = (
        "Shows whether a model binds values to keys as it reads, keeps them apart from noise, and "
        "joins neighbouring tokens to one key. Guessing is right once in n_values answers."
    )
    training = train_settings(LabelledTask, lr=1e-3, weight_decay=0.1)

    n_keys: Annotated[int, within(2)] = 8
    n_values: Count = 8
    key_length: Count = 1
    value_length: Count = 1
    noise: Fraction = 0.0
    n_noise: Count = 16
    length: Count = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [self.n_keys**size for size in range(1, min(self.key_length, 17) + 1)]
        if sum(sizes) > _MAX_KEYS:
            raise InputError(
                f"there can be {_MAX_KEYS:,} keys at most, which n_keys={self.n_keys} and "
                f"key_length={self.key_length} exceed: lower one of them"
            )
        self._sizes = np.cumsum([0, *sizes])  # keys of each size follow those that are shorter
        self.least_row = int(self._sizes[-1])
        self.vocab_size = self.n_keys + self.n_values + self.n_noise * (self.noise > 0)
        self._check_length(self.length)

    def _check_length(self, length: int) -> None:
        least = 2 * (self.key_length + self.value_length)
        if length < least:
            raise InputError(f"length must be at least {least}, for two pairs, got length={length}")

    def _answers(self, batches: int) -> Tensor:
        targets = torch.cat([self.labelled(self.train_length, n).targets for n in range(batches)])
        return targets[targets != IGNORE][:, None]

    def draw(self, rng: np.random.Generator, count: int, length: int, *, training: bool) -> Batch:
        """Draw rows of ``length`` tokens."""
        self._check_length(length)
        in_key, in_value = np.arange(self.key_length), np.arange(self.value_length)
        pairs, rows = np.arange(length // 2 + 2), np.arange(count)  # enough for the shortest pairs
        shape = count, len(pairs)
        key_sizes = rng.integers(1 if training else len(in_key), len(in_key), shape, endpoint=True)
        keys = rng.integers(self.n_keys, size=(*shape, len(in_key)))
        numbers = self._sizes[key_sizes - 1] + (
            keys * self.n_keys**in_key * (in_key < key_sizes[..., None])
        ).sum(2)
        table = rng.integers(self.n_values, size=(count, self._sizes[-1], len(in_value)))
        table_sizes = rng.integers(1, len(in_value), table.shape[:2], endpoint=True)
        noisy = rng.random(shape) < self.noise
        noisy[:, 0] = False

        ends = (key_sizes + np.take_along_axis(table_sizes, numbers, 1)).cumsum(1)
        last = (ends <= length + 1 - len(in_key) - len(in_value)).sum(1)  # the next pair fits
        earlier = (pairs < last[:, None]) & ~noisy
        asked = np.where(earlier, rng.random(shape), -1).argmax(1)
        for own in (key_sizes, keys, numbers, noisy):
            own[rows, last] = own[rows, asked]

        first = np.full(table_sizes.shape, len(pairs))
        np.minimum.at(first, (rows[:, None], numbers), np.where(noisy, len(pairs), pairs))
        seen = (np.take_along_axis(first, numbers, 1) < pairs) & ~noisy
        values = self.n_keys + table[rows[:, None], numbers]
        tokens = np.concatenate([keys, values], 2)
        others = self.n_keys + self.n_values + rng.integers(self.n_noise, size=tokens.shape)
        tokens = np.where(noisy[..., None], others, tokens)
        value_sizes = np.take_along_axis(table_sizes, numbers, 1)
        there = np.concatenate(
            [in_key < key_sizes[..., None], in_value < value_sizes[..., None]], axis=2
        ).reshape(count, -1)
        scored = np.broadcast_to(seen[..., None], tokens.shape) & (tokens >= self.n_keys)
        order = np.argsort(~there, axis=1, kind="stable")[:, : length + 1]
        tokens = np.take_along_axis(tokens.reshape(count, -1), order, 1)
        scored = np.take_along_axis(scored.reshape(count, -1), order, 1)
        targets = np.where(training | scored, tokens, IGNORE)
        return Batch(torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets[:, 1:]))
