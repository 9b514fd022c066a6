"""A block that stands at several depths: shared weights, and a small adapter for each depth."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from stateline.layers.base import AnyLayer, require_same_width
from stateline.layers.compose import Around, Chain, Stack
from stateline.layers.keywords import check_counts
from stateline.layers.linear import Linear


class Adapted(Around):
    r"""A layer at one of its depths: :math:`y = f(x + U V x)` with a map of low rank.

    Args:
        layer: The layer, which other depths have, too.
        rank: Rank of the map.
    """

    layer: AnyLayer

    def __init__(self, layer: AnyLayer, rank: int) -> None:
        super().__init__(layer.d_model)
        object.__setattr__(self, "layer", layer)  # its parameters belong to the wrapper
        self.causal = layer.causal
        self.down = Linear(layer.d_model, rank, bias=False)
        self.up = Linear(rank, layer.d_model, bias=False)

    @property
    def inner(self) -> AnyLayer:
        """The layer."""
        return self.layer

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input with its correction."""
        return x + self.up(self.down(x)), x

    def flops_per_token(self, length: int) -> float:
        """Operations of the adapter and of the layer."""
        return super().flops_per_token(length) + self.inner.flops_per_token(length)


class Shared(Chain):
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

    def __init__(self, core: AnyLayer, *, rank: int = 8) -> None:
        super().__init__(core.d_model)
        check_counts(rank=rank)
        require_same_width(core)
        self.core, self.rank, self.causal = core, rank, core.causal
        block, *parts = core.links if isinstance(core, Stack) else [core]
        self.adapted = nn.ModuleList(Adapted(block, rank) for _ in parts or [block])

    @property
    def links(self) -> Sequence[AnyLayer]:
        """The block at its depths, each before one of the parts."""
        parts = self.core.links[1:] if isinstance(self.core, Stack) else []
        found: list[Any] = []
        for i, place in enumerate(self.adapted):
            found += [place, *parts[i : i + 1]]
        return found
