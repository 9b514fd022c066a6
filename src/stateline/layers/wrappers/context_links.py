"""The layers of a core that gets its keys and values from a wrapper."""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from stateline.errors import InputError
from stateline.layers.base import AnyLayer, SequenceLayer
from stateline.layers.compose import Branch, Chain, inside
from stateline.layers.context import AttendsToContext, Context
from stateline.layers.mixers.feed_forward import FeedForward


class ContextLink:
    """One link of a core with the second interface.

    Args:
        link: A layer, alone or in a residual branch.

    Attributes:
        attends: Whether the layer has keys and values; a feed-forward has none.
    """

    def __init__(self, link: AnyLayer) -> None:
        self.link, self.layer = link, inside(link)
        self.attends = isinstance(self.layer, AttendsToContext)

    def project(self, x: Tensor, positions: Tensor) -> Context:
        """Keys and values that the layer computes from vectors of the residual stream."""
        entered = self.link.enter(x)[0] if isinstance(self.link, Branch) else x
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

    def attend(self, x: Tensor, *context: Any, **options: Any) -> tuple[Tensor, Context]:
        """Run the link on an input; see :meth:`AttendsToContext.attend` for its arguments."""
        attend = cast("AttendsToContext", self.layer).attend
        if not isinstance(self.link, Branch):
            return attend(x, *context, **options)
        entered, kept = self.link.enter(x)
        y, after = attend(entered, *context, **options)
        return self.link.leave(kept, y), after


def context_links(wrapper: str, core: AnyLayer) -> list[ContextLink]:
    """The links of a core of a wrapper: a layer, a stack, or a ladder of one, whose links recur.

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
