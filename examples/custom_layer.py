"""A sequence layer outside the package: an exponential moving average.

Run it: python examples/custom_layer.py
It checks the layer.
Compare it: stateline compare moving_average h3 --import examples/custom_layer.py --tasks copying
"""

import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stateline import InputError, SequenceLayer, check_layer, register_layer
from stateline.layers import accumulates
from stateline.ops import fft_conv


@accumulates("mean")
class MovingAverageState(NamedTuple):
    """The current mean of each channel, in which rounding errors accumulate."""

    mean: Float[Tensor, "batch d_model"]


class MovingAverage(SequenceLayer[MovingAverageState]):
    r"""Exponential moving average of each channel, then a map across channels.

    .. math:: m_t = a\, m_{t-1} + (1 - a)\, x_t, \qquad y_t = W m_t + b

    Args:
        d_model: Number of channels.
        slowest: Memory of the slowest channel in tokens; the fastest remembers one token.

    Raises:
        InputError: If ``slowest`` is below one.
    """

    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = {"log_memory": "ssm"}

    def __init__(self, d_model: int, *, slowest: float = 100.0) -> None:
        super().__init__(d_model)
        if slowest < 1:
            raise InputError(f"slowest must be at least 1 token, got {slowest=}")
        self.log_memory = nn.Parameter(torch.linspace(0, math.log(slowest), d_model))
        self.out_proj = nn.Linear(d_model, d_model)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> MovingAverageState:
        """Zero mean."""
        return MovingAverageState(self.log_memory.new_zeros(batch_size, self.d_model))

    def _forward_chunk(
        self, x: Tensor, state: MovingAverageState
    ) -> tuple[Tensor, MovingAverageState]:
        """Convolve with the decay, and add the remaining contribution of the previous mean."""
        decay = self.log_memory.sigmoid()
        powers = decay ** torch.arange(x.shape[1] + 1, device=x.device)[:, None]
        new = fft_conv(x.to(decay.dtype), ((1 - decay) * powers[:-1]).mT)
        mean = new + powers[1:] * state.mean[:, None]
        return self.out_proj(mean.to(x.dtype)), MovingAverageState(mean[:, -1].clone())

    def step(self, x: Tensor, state: MovingAverageState) -> tuple[Tensor, MovingAverageState]:
        """Update the mean with one input."""
        mean = torch.lerp(x.to(state.mean.dtype), state.mean, self.log_memory.sigmoid())
        return self.out_proj(mean.to(x.dtype)), MovingAverageState(mean)


register_layer("moving_average", MovingAverage)

if __name__ == "__main__":
    print(check_layer(MovingAverage(8)))
