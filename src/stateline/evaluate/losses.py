"""Losses of single tokens, and their means by position."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.models.language_model import Reduce, chunks
from stateline.models.likelihood import token_losses

_LOGITS = 2**24
"""Logits that are in memory at a time, unless those of one position of each row are more."""


def losses_of(targets: Int[Tensor, "batch length"], vocab_size: int) -> Reduce:
    """The losses of tokens in place of a model's logits, which are not all in memory at a time."""

    def reduce(logits: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        parts = chunks(h, targets, _LOGITS // vocab_size)
        return torch.cat([token_losses(logits(x), wanted) for x, wanted in parts], dim=1)

    return reduce


class Buckets:
    """Means of losses in nats, by position: 1 to ``first``, then up to twice that, and so on.

    The position of a token is the number of tokens that it is predicted from.

    Args:
        first: Last position of the first bucket.
        last: Last position of the last bucket; by default there is no limit.

    Attributes:
        sums: Sum of the losses in nats, by last position of the bucket.
        counts: Number of losses, by the same positions.

    Example:
        >>> buckets = Buckets(2)
        >>> buckets.add(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([8.0, 6.0, 3.0, 1.0, 1.0]))
        >>> buckets.means()
        {2: 7.0, 4: 2.0, 8: 1.0}
    """

    def __init__(self, first: int, last: int | None = None) -> None:
        self.first, self.last = first, last
        self.sums: dict[int, float] = {}
        self.counts: dict[int, int] = {}

    def add(self, positions: Int[Tensor, " n"], losses: Float[Tensor, " n"]) -> None:
        """Add losses; they are read back from their device at once."""
        positions, losses = positions.cpu(), losses.cpu()
        doublings = ((positions - 1) // self.first + 1).double().log2().ceil()
        for doubling in doublings.unique().tolist():
            here = losses[doublings == doubling]
            end = self.first * 2 ** int(doubling)
            end = end if self.last is None else min(end, self.last)
            self._add(end, float(here.double().sum()), len(here))

    def merge(self, other: "Buckets") -> None:
        """Add the losses of other buckets with the same limits."""
        for end, total in other.sums.items():
            self._add(end, total, other.counts[end])

    @property
    def count(self) -> int:
        """Number of losses in all buckets."""
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        """Mean of all losses, in nats."""
        return sum(self.sums.values()) / self.count

    def means(self) -> dict[int, float]:
        """Mean loss in nats, by last position of the bucket."""
        return {end: self.sums[end] / self.counts[end] for end in sorted(self.sums)}

    def _add(self, end: int, total: float, count: int) -> None:
        self.sums[end] = self.sums.get(end, 0.0) + total
        self.counts[end] = self.counts.get(end, 0) + count
