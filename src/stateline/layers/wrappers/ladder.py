"""Ladder: several passes through the same layers, with shared weights."""

from collections.abc import Sequence

from stateline.layers.base import AnyLayer, require_same_width
from stateline.layers.compose import Chain
from stateline.settings import Count


class Ladder(Chain):
    r"""Apply one core several times.

    .. math:: h^{(0)} = x, \qquad h^{(n)} = \mathrm{core}(h^{(n-1)})

    Each pass has its own state of the core, since the passes have different inputs.
    With a core of several blocks the order is ABAB; AABB is a stack of ladders of one block each.

    Args:
        core: Any sequence layer.
        passes: Number of passes.

    Raises:
        InputError: If ``passes`` is not positive.

    References:
        Ju et al., "Staircase Attention for Recurrent Processing of Sequences", 2021,
        section 3.2.4.
    """

    def __init__(self, core: AnyLayer, *, passes: Count = 2) -> None:
        super().__init__(core.d_model)
        require_same_width(core)
        self.core, self.passes, self.causal = core, passes, core.causal

    @property
    def links(self) -> Sequence[AnyLayer]:
        """The core, once per pass."""
        return (self.core,) * self.passes
