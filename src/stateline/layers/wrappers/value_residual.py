"""Values of RWKV-7 that are mixed with those of its first layer."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from stateline.layers.base import AnyLayer, require_same_width
from stateline.layers.compose import Branch, Stack, Walk, inside
from stateline.layers.keywords import check_counts
from stateline.layers.linear import Linear
from stateline.layers.mixers.rwkv7 import RWKV7, Values


class ValueMix(nn.Module):
    r"""How much of a layer's values is replaced by those of the first layer.

    .. math:: v \leftarrow v + \sigma(U V x_v + b) \odot (v_1 - v)

    Args:
        d_model: Width of the values.
        rank: Rank of the map.
    """

    def __init__(self, d_model: int, rank: int) -> None:
        super().__init__()
        self.down = Linear(d_model, rank, bias=False)
        self.up = Linear(rank, d_model)

    def forward(self, first: list[Tensor], x: Tensor, v: Tensor) -> Tensor:
        """The values of a layer after the first."""
        return torch.lerp(v, first[0], self.up(self.down(x)).sigmoid())


class ValueResidual(Walk):
    r"""Layers in sequence, of which each ``rwkv7`` after the first mixes in the first one's values.

    .. math:: v^{(l)} \leftarrow v^{(l)} + \sigma(U_l V_l x_v^{(l)} + b_l) \odot (v^{(1)} - v^{(l)})

    In a pattern, ``value_residual((rwkv7 channel_mixing)*12)``. Layers of other kinds are as they
    would be without the wrapper.

    Args:
        core: The layers.
        rank: Rank of the maps :math:`U_l V_l`.

    Raises:
        InputError: If ``rank`` is not positive.

    References:
        Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025, section 4.
    """

    def __init__(self, core: AnyLayer, *, rank: int = 16) -> None:
        super().__init__(core.d_model)
        check_counts(rank=rank)
        require_same_width(core)
        self.core = core if isinstance(core, Stack) else Stack(core)
        self.causal, self.rank = core.causal, rank
        later = [link for link in self.core.links if isinstance(inside(link), RWKV7)][1:]
        self.mixes = nn.ModuleList(ValueMix(core.d_model, rank) for _ in later)

    @property
    def links(self) -> Sequence[AnyLayer]:
        """The layers."""
        return self.core.links

    def flops_per_token(self, length: int) -> float:
        """Operations of the layers and of the maps."""
        maps = sum(2.0 * p.numel() for p in self.mixes.parameters() if p.dim() == 2)
        return super().flops_per_token(length) + maps

    def walk(self, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        """The output, where ``call`` runs a layer, with a function of its values if it is one."""
        values = self._values()
        for link in self.links:
            layer = inside(link)
            if not isinstance(layer, RWKV7):
                x = call(link, x)
            elif isinstance(link, Branch):
                entered, kept = link.enter(x)
                x = link.leave(kept, call(layer, entered, values=next(values)))
            else:
                x = call(layer, x, values=next(values))
        return x

    def _values(self) -> Iterator[Values]:
        """For each layer of RWKV-7, the function of its values."""
        first: list[Tensor] = []

        def keep(_: Tensor, v: Tensor) -> Tensor:
            first[:] = [v]
            return v

        yield keep
        for mix in self.mixes:
            yield partial(mix, first)
