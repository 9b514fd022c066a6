"""RWKV-7 layers that mix the values of the first one into their own."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import AnyLayer, flops_inside, require_same_width
from stateline.layers.compose import ActivationCheckpointing, Composite, Stack, inside
from stateline.layers.linear import LowRank
from stateline.layers.mixers.rwkv7 import RWKV7, Values
from stateline.settings import Count


class ValueResidual(ActivationCheckpointing, Composite):
    r"""Layers in sequence; every later ``rwkv7`` mixes the values of the first into its own.

    .. math:: v^{(l)} \leftarrow v^{(l)} + \sigma(U_l V_l x_v^{(l)} + b_l) \odot (v^{(1)} - v^{(l)})

    In a pattern, ``value_residual((rwkv7 channel_mixing)*12)``. Layers of other kinds are as they
    would be without the wrapper.

    Args:
        core: The layers.
        rank: Rank of the maps :math:`U_l V_l`.

    Raises:
        InputError: If ``rank`` is not positive, or layers have values of different widths.

    References:
        Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025, section 4.
    """

    def __init__(self, core: AnyLayer, *, rank: Count = 16) -> None:
        super().__init__(core.d_model)
        require_same_width(core)
        self.core = core if isinstance(core, Stack) else Stack(core)
        self.causal, self.rank, width = core.causal, rank, core.d_model
        mixed = [layer for link in self.links if isinstance(layer := inside(link), RWKV7)]
        values = [layer.v_proj.out_features for layer in mixed]
        if len({*values}) > 1:
            raise InputError(
                f"value_residual needs values of one width in all layers, got {values}: give all "
                "rwkv7 the same n_heads and d_head"
            )
        self.mixes = nn.ModuleList(LowRank(width, rank, n, bias=True) for n in values[1:])

    @property
    def links(self) -> Sequence[AnyLayer]:
        """The layers."""
        return self.core.links

    def flops_per_token(self, length: int) -> float:
        """Operations of the layers and of the maps."""
        return super().flops_per_token(length) + flops_inside(self.mixes, length)

    def run_links(self, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        """The output of the last layer; each ``rwkv7`` gets a function of its values."""
        values = self._values()
        for link in self.links:
            own = {"values": next(values)} if isinstance(inside(link), RWKV7) else {}
            x = call(link, x, **own)
        return x

    def _values(self) -> Iterator[Values]:
        """For each layer of RWKV-7, the function of its values."""
        first: list[Tensor] = []

        def keep(_: Tensor, v: Tensor) -> Tensor:
            first[:] = [v]
            return v

        def mixed(mix: nn.Module, x: Tensor, v: Tensor) -> Tensor:
            return torch.lerp(v, first[0], mix(x).sigmoid())

        yield keep
        for mix in self.mixes:
            yield partial(mixed, mix)
