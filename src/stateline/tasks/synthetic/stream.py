"""An endless sequence of episodes, cut into rows."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int

from stateline.settings import Count
from stateline.tasks.base import IGNORE, Batch, ConsecutiveBatch, LabelledTask, generator

SEGMENTS = 64
"""Consecutive segments of a row, after which it starts again with other episodes."""


class Episode(NamedTuple):
    """One problem from beginning to end; the target of positions without a label is ``IGNORE``."""

    tokens: Int[np.ndarray, " n"]
    targets: Int[np.ndarray, " n"]


class SegmentedRows(NamedTuple):
    """Rows cut into segments, and which segments start from an empty state."""

    tokens: Int[np.ndarray, "rows segments length"]
    targets: Int[np.ndarray, "rows segments length"]
    fresh: Bool[np.ndarray, "rows segments"]


@dataclass(eq=False, kw_only=True)
class StreamTask(LabelledTask):
    """An endless sequence of episodes, in which the state carries over from one to the next.

    Every row begins with a new episode and is cut when it is full.

    Args:
        reset: Begin every episode at the start of a segment and from an empty state; the rest of
            the segment before it is padded, with ``IGNORE`` as targets. An independent row, as in
            evaluation, then holds a single episode.
        episodes: Different episodes in training; by default new ones without end. Evaluation always
            draws new ones.
        **options: See :class:`~stateline.tasks.LabelledTask`.
    """

    carries_state = True
    length: Count = 128
    reset: bool = False
    episodes: Count | None = None
    _epoch: tuple[int, SegmentedRows] | None = field(default=None, init=False, repr=False)
    """Number and contents of the epoch that was read last."""

    @abstractmethod
    def episode(self, rng: np.random.Generator) -> Episode:
        """Draw an episode."""

    def draw(self, rng: np.random.Generator, count: int, length: int, *, training: bool) -> Batch:
        """Draw rows that begin with an episode."""
        known = self.episodes if training else None
        rows = self._rows(rng, known, count, 1, length)
        return Batch(torch.from_numpy(rows.tokens[:, 0]), torch.from_numpy(rows.targets[:, 0]))

    def consecutive_batch(self, index: int) -> ConsecutiveBatch:
        """Training batch number ``index``: its rows continue the rows of the previous batch.

        After 64 batches an epoch ends, and every row starts again.
        """
        epoch, step = divmod(index, SEGMENTS)
        if self._epoch is None or self._epoch[0] != epoch:
            rng = generator(self.seed, "epoch", epoch)
            sizes = (self.batch_size, SEGMENTS, self.train_length)
            self._epoch = epoch, self._rows(rng, self.episodes, *sizes)
        tokens, targets, fresh = (torch.from_numpy(part[:, step]) for part in self._epoch[1])
        return ConsecutiveBatch(tokens, targets, fresh)

    def _rows(
        self, rng: np.random.Generator, known: int | None, count: int, segments: int, length: int
    ) -> SegmentedRows:
        total = segments * length
        tokens = np.zeros((count, total), dtype=np.int64)
        targets, fresh = np.full_like(tokens, IGNORE), np.zeros((count, segments), dtype=bool)
        fresh[:, 0] = True
        for row in range(count):
            at = 0
            while at < total:
                episode = self._drawn(rng, known)
                for whole, part in zip((tokens, targets), episode, strict=True):
                    whole[row, at : at + len(part)] = part[: total - at]
                if self.reset:
                    fresh[row, at // length] = True
                    at += -(-len(episode.tokens) // length) * length
                else:
                    at += len(episode.tokens)
        shape = (count, segments, length)
        return SegmentedRows(tokens.reshape(shape), targets.reshape(shape), fresh)

    def _drawn(self, rng: np.random.Generator, known: int | None) -> Episode:
        """A new episode, or one of a limited number of known ones."""
        if known is None:
            return self.episode(rng)
        return self.episode(generator(self.seed, "episode", int(rng.integers(known))))
