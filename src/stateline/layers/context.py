"""A second interface of attention layers: attending to given keys and values.

The cached staircase and the feedback wrapper compute keys and values for the layers of their core,
from vectors of the residual stream other than the layers' inputs. Only attention can use them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


class Context(NamedTuple):
    """Keys and values of consecutive positions, the latest last.

    In rows with fewer positions, the first slots are free.
    """

    k: Float[Tensor, "batch slot head d_head"]
    v: Float[Tensor, "batch slot head d_head"]

    @staticmethod
    def cat(states: Sequence["Context"]) -> "Context":
        """Join rows with different numbers of slots; shorter rows get free slots in front."""
        slots = max(state.slots for state in states)
        padded = [state.with_slots(slots) for state in states]
        return Context(torch.cat([p.k for p in padded]), torch.cat([p.v for p in padded]))

    @staticmethod
    def fit(state: "Context", like: "Context") -> "Context":
        """Give a context the number of slots of another one."""
        return state.with_slots(like.slots)

    @property
    def slots(self) -> int:
        """Number of slots, free ones included."""
        return self.k.shape[1]

    def then(self, later: "Context") -> "Context":
        """Append another context."""
        return Context(
            torch.cat([self.k, later.k.to(self.k.dtype)], dim=1),
            torch.cat([self.v, later.v.to(self.v.dtype)], dim=1),
        )

    def part(self, start: int, stop: int) -> "Context":
        """Slots from ``start`` to ``stop``."""
        return Context(self.k[:, start:stop], self.v[:, start:stop])

    def with_slots(self, slots: int) -> "Context":
        """Drop the earliest slots or add free ones in front, to get a number of slots."""
        k, v = (F.pad(t, (0, 0, 0, 0, slots - t.shape[1], 0)) for t in self)
        return Context(k, v)


class AttendsToContext(ABC):
    """A layer whose keys and values can come from other vectors than its input."""

    @abstractmethod
    def project_context(
        self, x: Float[Tensor, "batch length d_model"], positions: Int[Tensor, "batch length"]
    ) -> Context:
        """Keys and values of vectors at positions in the sequence."""

    @abstractmethod
    def context_flops(self) -> float:
        """Operations of ``project_context`` per vector."""

    @property
    @abstractmethod
    def past_visible(self) -> float:
        """Largest number of earlier positions that a position sees; may be infinite."""

    @abstractmethod
    def attend(
        self,
        x: Float[Tensor, "batch length d_model"],
        positions: Int[Tensor, "batch length"],
        context: Context,
        valid: Int[Tensor, " batch"],
        *,
        to_itself: bool = True,
    ) -> tuple[Float[Tensor, "batch length d_model"], Context]:
        """Attend to a context and causally to the input itself.

        Args:
            x: The input.
            positions: Positions of the input in the sequence.
            context: Keys and values of the positions right before the input.
            valid: For each row, the number of slots in use, counted from the end of the context.
            to_itself: Whether the input's own keys and values are visible.

        Returns:
            The output, and the context; with ``to_itself``, the input's own keys and values are
            appended to it.
        """


def mean_visible(length: int | float, window: int | float) -> float:
    """Average number of earlier items seen in a sequence, if each sees the last ``window`` of them.

    Example:
        >>> mean_visible(4, 2)
        1.25
    """
    window = min(window, length)
    return window - window * (window + 1) / (2 * length)
