"""Filters that see a fixed number of tokens back, with the latest inputs as their state."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.layers.base import SequenceLayer, zeros
from stateline.layers.derived import derived
from stateline.layers.diagonal_ssm import convolution_flops
from stateline.ops import short_conv, slide


class FiniteFilterState(NamedTuple):
    """The latest inputs, oldest first: one fewer than the filters have taps."""

    past: Float[Tensor, "batch past d_model"]


class FiniteFilter(SequenceLayer[FiniteFilterState]):
    """Causal filters of ``filter_len`` taps, one or more for each channel, and a skip connection.

    Abstract: it does not say where the taps come from. Beyond them the filters are zero, whatever
    the length of the input. All channels of the first filter come first, then those of the second.

    Attributes:
        filter_len: Taps of each filter, this token's included; a subclass defines it.
        skip: What each output takes of its channel's input as it is; a subclass defines it.
    """

    filter_len: int
    skip: Float[Tensor, " output"]

    @abstractmethod
    def taps(self) -> Float[Tensor, "output filter_len"]:
        """All filters, at least float32; the skip connection is part of their first tap."""

    def init_state(self, batch_size: int, *, capacity: int = 0) -> FiniteFilterState:  # noqa: ARG002
        """No input yet: zeros."""
        return FiniteFilterState(zeros(self.skip, batch_size, self.filter_len - 1, self.d_model))

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length output"]:
        """Filter the sequence."""
        return short_conv(x, self.taps())

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: FiniteFilterState
    ) -> tuple[Float[Tensor, "batch length output"], FiniteFilterState]:
        """Filter the chunk after what came before it."""
        return short_conv(x, self.taps(), state.past), FiniteFilterState(slide(state.past, x))

    def step(
        self, x: Float[Tensor, "batch d_model"], state: FiniteFilterState
    ) -> tuple[Float[Tensor, "batch output"], FiniteFilterState]:
        """Weigh the latest inputs."""
        reach = torch.cat([state.past, x[:, None].to(state.past.dtype)], dim=1)
        y = torch.cat([(reach * weights).sum(dim=1) for weights in self.weights()], dim=-1)
        return y.to(x.dtype), FiniteFilterState(reach[:, 1:])

    def flops_per_token(self, length: int) -> float:
        """Each output by a convolution, or by a multiply-add per tap where that costs less."""
        return len(self.skip) * min(convolution_flops(length), 2.0 * self.filter_len)

    @derived
    def weights(self) -> Float[Tensor, "filter taps d_model"]:
        """The filters as inputs lie in the state: what the oldest one is worth comes first.

        Laid out anew: with a view, a step takes several times as long.
        """
        return self.taps().unflatten(0, (-1, self.d_model)).flip(-1).mT.contiguous()
