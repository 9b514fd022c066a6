"""A block that stands at several depths: shared weights, and a small adapter for each depth."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import ClassVar

from torch import Tensor, nn

from stateline.layers.base import AnyLayer, flops_inside, require_same_width
from stateline.layers.compose import ActivationCheckpointing, Composite, Stack
from stateline.layers.linear import LowRank
from stateline.settings import Count


class Shared(ActivationCheckpointing, Composite):
    r"""A block with the same weights before each of several other parts of the stack.

    .. math:: h \leftarrow \mathrm{part}_i(\mathrm{block}(h + U_i V_i h)), \qquad i = 1, ..., n

    In a pattern, the first argument is the block, and the others are the parts,
    ``shared(attention, mamba2*5, mamba2*6)``: here the attention stands at two depths. Each depth
    has a state of its own, and an adapter of low rank.

    Args:
        core: A stack of the block and the parts; a block alone stands at one depth.
        rank: Rank of the adapters.

    Raises:
        InputError: If ``rank`` is not positive.

    References:
        Glorioso et al., "The Zamba2 Suite", 2024, section 2.
    """

    # Differs from Zamba2, whose adapters correct the maps inside the block, which also reads the
    # embedding of the token; here they correct the input. Zamba2's is ``shared_transformer``.

    takes_several: ClassVar[bool] = True

    def __init__(self, core: AnyLayer, *, rank: Count = 8) -> None:
        super().__init__(core.d_model)
        require_same_width(core)
        self.core, self.rank, self.causal = core, rank, core.causal
        depths, width = max(1, len(self._parts[1:])), core.d_model
        self.adapted = nn.ModuleList(LowRank(width, rank, width) for _ in range(depths))

    @property
    def _parts(self) -> Sequence[AnyLayer]:
        """The block and the other parts."""
        return self.core.links if isinstance(self.core, Stack) else [self.core]

    @property
    def links(self) -> Sequence[AnyLayer]:
        """The block at its depths, each before one of the parts."""
        block, *parts = self._parts
        return [link for part in parts for link in (block, part)] or [block]

    def run_links(self, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        """Correct the input of the block at each depth."""
        block, *parts = self._parts
        for adapter, part in zip_longest(self.adapted, parts):
            x = call(block, x + adapter(x))
            x = x if part is None else call(part, x)
        return x

    def flops_per_token(self, length: int) -> float:
        """Operations of the links and of the adapters."""
        return super().flops_per_token(length) + flops_inside(self.adapted, length)
