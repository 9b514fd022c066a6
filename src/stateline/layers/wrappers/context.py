"""A second interface of attention layers: attending to given keys and values.

The cached staircase and the feedback wrapper give each layer of their core keys and values made
from other vectors of the residual stream than its inputs. Only attention can use them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from stateline.errors import InputError
from stateline.layers.base import AnyLayer, SequenceLayer
from stateline.layers.compose import Branch, Chain
from stateline.layers.mixers.feed_forward import FeedForward


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
        """Give a context as many slots as another."""
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
        """Keys and values of given vectors.

        Args:
            x: The vectors.
            positions: Positions of the vectors in the sequence.
        """

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


class ContextLink:
    """One link of a core with the second interface.

    Args:
        link: A layer, alone or in a residual branch.
    """

    def __init__(self, link: AnyLayer) -> None:
        self.link = link
        self.layer = link.layer if isinstance(link, Branch) else link

    @property
    def attends(self) -> bool:
        """Whether the layer has keys and values; a feed-forward has none."""
        return isinstance(self.layer, AttendsToContext)

    def project(self, x: Tensor, positions: Tensor) -> Context:
        """Keys and values that the layer computes from vectors of the residual stream."""
        entered = self.link.enter(x) if isinstance(self.link, Branch) else x
        return cast("AttendsToContext", self.layer).project_context(entered, positions)

    def context_flops(self) -> float:
        """Operations of ``project`` per vector."""
        return cast("AttendsToContext", self.layer).context_flops()

    def attend_flops(self, earlier: Callable[[float], float], own: int | float) -> float:
        """Operations of ``attend`` per token: linear maps, scores and weighted sums.

        Args:
            earlier: Average number of keys from earlier positions that a token sees, given the
                largest number that the layer allows.
            own: Average number of further keys that it sees.
        """
        flops = SequenceLayer.flops_per_token(self.layer, 1)
        if not self.attends:
            return flops
        seen = earlier(cast("AttendsToContext", self.layer).past_visible) + own
        return flops + 4.0 * self.layer.d_model * seen

    def attend(
        self,
        x: Tensor,
        positions: Tensor,
        context: Context,
        valid: Tensor,
        *,
        to_itself: bool = True,
    ) -> tuple[Tensor, Context]:
        """Run the link on an input; see :meth:`AttendsToContext.attend`."""
        attend = cast("AttendsToContext", self.layer).attend
        if not isinstance(self.link, Branch):
            return attend(x, positions, context, valid, to_itself=to_itself)
        y, after = attend(self.link.enter(x), positions, context, valid, to_itself=to_itself)
        return self.link.join(x, y), after


def mean_visible(length: int | float, window: int | float) -> float:
    """Average number of earlier items seen in a sequence, if each sees the last ``window`` of them.

    Example:
        >>> mean_visible(4, 2)
        1.25
    """
    window = min(window, length)
    return window - window * (window + 1) / (2 * length)


def context_links(wrapper: str, core: AnyLayer) -> list[ContextLink]:
    """The links of a core of attention layers and feed-forwards.

    Args:
        wrapper: Name of the wrapper, for messages.
        core: A layer, a stack, or a ladder of one.

    Returns:
        The links in order; a link of several passes occurs several times.

    Raises:
        InputError: If a layer of the core is neither attention nor a feed-forward, or no layer is
            attention.
    """
    links = _flat(core)
    for link in links:
        if not link.attends and not isinstance(link.layer, FeedForward):
            raise InputError(
                f"{wrapper} gives keys and values to its core, which must consist of attention, "
                "sliding_attention and feed-forwards, got "
                f"{type(link.layer).__name__}; staircase takes any core"
            )
    if not any(link.attends for link in links):
        raise InputError(
            f"{wrapper} gives keys and values to its core, which needs at least one attention or "
            "sliding_attention, got feed-forwards only; staircase takes any core"
        )
    return links


def _flat(core: AnyLayer) -> list[ContextLink]:
    if isinstance(core, Chain):
        return [inner for link in core.links for inner in _flat(link)]
    return [ContextLink(core)]
