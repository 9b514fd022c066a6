"""The second interface of a core: its layers attend to vectors that they are given.

Cached and feedback recurrences give every layer keys and values made from vectors of the residual
stream that are not its own inputs. Only attention can take them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from stateline.errors import InputError
from stateline.layers.base import AnyLayer
from stateline.layers.compose import Branch, Chain
from stateline.layers.feed_forward import FeedForward


class Context(NamedTuple):
    """Keys and values of consecutive positions, the latest last.

    Rows that have fewer of them leave the first slots free.
    """

    k: Float[Tensor, "batch slot head d_head"]
    v: Float[Tensor, "batch slot head d_head"]

    @staticmethod
    def cat(states: Sequence["Context"]) -> "Context":
        """Join rows with different numbers of slots: the shorter ones get free slots in front."""
        slots = max(state.slots for state in states)
        padded = [state.with_slots(slots) for state in states]
        return Context(torch.cat([p.k for p in padded]), torch.cat([p.v for p in padded]))

    @staticmethod
    def fit(state: "Context", like: "Context") -> "Context":
        """With as many slots as another."""
        return state.with_slots(like.slots)

    @property
    def slots(self) -> int:
        """Number of slots, free ones included."""
        return self.k.shape[1]

    def then(self, later: "Context") -> "Context":
        """With more slots at the end."""
        return Context(
            torch.cat([self.k, later.k.to(self.k.dtype)], dim=1),
            torch.cat([self.v, later.v.to(self.v.dtype)], dim=1),
        )

    def part(self, start: int, stop: int) -> "Context":
        """Some of the slots."""
        return Context(self.k[:, start:stop], self.v[:, start:stop])

    def with_slots(self, slots: int) -> "Context":
        """As many slots: the earliest are dropped, or free ones stand in front."""
        k, v = (F.pad(t, (0, 0, 0, 0, slots - t.shape[1], 0)) for t in self)
        return Context(k, v)


class AttendsToContext(ABC):
    """A layer whose keys and values may come from elsewhere than its input."""

    @abstractmethod
    def project_context(
        self, x: Float[Tensor, "batch length d_model"], positions: Int[Tensor, "batch length"]
    ) -> Context:
        """Keys and values of given vectors.

        Args:
            x: The vectors.
            positions: Where in the sequence they stand.
        """

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
        """Attend to a context and, as far as causality allows, to the input itself.

        Args:
            x: The input.
            positions: Where in the sequence it stands.
            context: Keys and values of the positions right before the input.
            valid: For each row, how many slots of the context, counted from the end, hold
                something.
            to_itself: Whether the input's own keys and values are seen.

        Returns:
            The output, and the context with the input's own keys and values after it (with
            ``to_itself`` only).
        """


class ContextLink:
    """One link of a core, seen through the second interface.

    Args:
        link: A layer, alone or in a residual branch.
    """

    def __init__(self, link: AnyLayer) -> None:
        self.link = link
        self.layer = link.layer if isinstance(link, Branch) else link

    @property
    def attends(self) -> bool:
        """Whether it has keys and values; a feed-forward has none."""
        return isinstance(self.layer, AttendsToContext)

    def project(self, x: Tensor, positions: Tensor) -> Context:
        """Keys and values that the layer makes of vectors of the residual stream."""
        entered = self.link.enter(x) if isinstance(self.link, Branch) else x
        return cast("AttendsToContext", self.layer).project_context(entered, positions)

    def attend(
        self,
        x: Tensor,
        positions: Tensor,
        context: Context,
        valid: Tensor,
        *,
        to_itself: bool = True,
    ) -> tuple[Tensor, Context]:
        """Run the link on ``x``."""
        attend = cast("AttendsToContext", self.layer).attend
        if not isinstance(self.link, Branch):
            return attend(x, positions, context, valid, to_itself=to_itself)
        y, after = attend(self.link.enter(x), positions, context, valid, to_itself=to_itself)
        return self.link.join(x, y), after


def context_links(wrapper: str, core: AnyLayer) -> list[ContextLink]:
    """The links of a core that attends.

    Args:
        wrapper: Who asks, for messages.
        core: A layer, a stack, or passes of one.

    Returns:
        Its links in order; a link that is passed several times stands in several places.

    Raises:
        InputError: If a layer of the core can neither attend to a context nor do without, or none
            attends.
    """
    links = _flat(core)
    for link in links:
        if not link.attends and not isinstance(link.layer, FeedForward):
            raise InputError(
                f"{wrapper} gives keys and values to its core: it wants attention, "
                "sliding_attention and feed-forwards, got "
                f"{type(link.layer).__name__}; staircase takes any core"
            )
    if not any(link.attends for link in links):
        raise InputError(
            f"{wrapper} gives keys and values to its core: it wants at least one attention or "
            "sliding_attention, got feed-forwards only; staircase takes any core"
        )
    return links


def _flat(core: AnyLayer) -> list[ContextLink]:
    if isinstance(core, Chain):
        return [inner for link in core.links for inner in _flat(link)]
    return [ContextLink(core)]
