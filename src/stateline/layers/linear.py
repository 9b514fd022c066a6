"""Linear maps of layers."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stateline.layers.decoder import prepared
from stateline.ops import linear_stepper
from stateline.ops.linear import LEAST, linear
from stateline.ops.pointwise import READ


class Linear(nn.Linear):
    """``nn.Linear``, multiplied by the library that is faster on this processor.

    Args:
        in_features: Width of the input.
        out_features: Width of the output; or the widths of several maps that are one matrix, which
            optimizers of matrices (Muon) change one by one.
        bias: Whether the map has a bias.
        heads: Number of heads in each of these maps, which Muon may change one by one, too.
        turns: Number of maps in each of these widths, if their heads take turns: the first head of
            each map, then the second.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = True,
        *,
        heads: int | Sequence[int] = 1,
        turns: int | Sequence[int] = 1,
    ) -> None:
        parts = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        super().__init__(in_features, sum(parts), bias=bias)
        self.parts = parts
        self.part_heads, self.part_turns = (
            (each,) * len(parts) if isinstance(each, int) else tuple(each)
            for each in (heads, turns)
        )

    decodes = False

    def forward(self, x: Tensor) -> Tensor:
        """Map the last axis."""
        if self.decodes and (step := self.step()):
            return step(x)
        if self.decodes and x.numel() * self.out_features < LEAST:
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)

    @prepared
    def step(self) -> Callable[[Tensor], Tensor] | None:
        """The map of single tokens, where its preparation may gain."""
        return linear_stepper(self.weight, self.bias) if self.weight.numel() >= READ else None


class ScaledLinear(Linear):
    """A linear map whose outputs are multiplied by constants.

    Args:
        d_in: Width of the input.
        factors: The widths of parts of the output, and the constant of each.
        bias: Whether the map has a bias.
    """

    def __init__(self, d_in: int, factors: Sequence[tuple[int, float]], *, bias: bool) -> None:
        super().__init__(d_in, [width for width, _ in factors], bias=bias)
        self.factors = tuple(factors)

    def forward(self, x: Tensor) -> Tensor:
        """Map the last axis."""
        parts = super().forward(x).split([width for width, _ in self.factors], dim=-1)
        scaled = [factor * part for part, (_, factor) in zip(parts, self.factors, strict=True)]
        return scaled[0] if len(scaled) == 1 else torch.cat(scaled, dim=-1)


class LowRank(nn.Module):
    r"""A linear map of low rank, :math:`x \mapsto U V x + b`.

    Args:
        d_in: Width of the input.
        rank: Length of :math:`V x`.
        d_out: Width of the output.
        bias: Whether there is a b.
    """

    def __init__(self, d_in: int, rank: int, d_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.down = Linear(d_in, rank, bias=False)
        self.up = Linear(rank, d_out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map the last axis."""
        return self.up(self.down(x))


def scaled_linear(d_in: int, *factors: tuple[int, float], bias: bool) -> Linear:
    """A linear map whose outputs have the given widths and factors."""
    if all(factor == 1 for _, factor in factors):
        return Linear(d_in, [width for width, _ in factors], bias=bias)
    return ScaledLinear(d_in, factors, bias=bias)
