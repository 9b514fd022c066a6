"""A sequence layer outside the package: a gated moving average.

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
from stateline.ops import linear_scan


@accumulates("mean")
class MovingAverageState(NamedTuple):
    """The current mean of each channel, in which rounding errors accumulate."""

    mean: Float[Tensor, "batch d_model"]


class MovingAverage(SequenceLayer[MovingAverageState]):
    r"""Moving average of each channel whose memory the input chooses, then a map across channels.

    .. math::
        f_t = \sigma(W_f x_t + \theta), \qquad m_t = f_t \odot m_{t-1} + (1 - f_t) \odot x_t,
        \qquad y_t = W m_t + b

    Args:
        d_model: Number of channels.
        slowest: Memory of the slowest channel in tokens where the gate is closed; the fastest
            remembers one token.

    Raises:
        InputError: If ``slowest`` is below one.
    """

    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = {"log_memory": "ssm"}

    def __init__(self, d_model: int, *, slowest: float = 100.0) -> None:
        super().__init__(d_model)
        if slowest < 1:
            raise InputError(f"slowest must be at least 1 token, got {slowest=}")
        self.gate = nn.Linear(d_model, d_model, bias=False)
        self.log_memory = nn.Parameter(torch.linspace(0, math.log(slowest), d_model))
        self.out_proj = nn.Linear(d_model, d_model)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> MovingAverageState:
        """Zero mean."""
        return MovingAverageState(self.log_memory.new_zeros(batch_size, self.d_model))

    def forward_chunk(
        self, x: Tensor, state: MovingAverageState
    ) -> tuple[Tensor, MovingAverageState]:
        """Run the recurrence, whose last state goes on."""
        f = (self.gate(x) + self.log_memory).sigmoid()
        h, mean = linear_scan(f, (1 - f) * x, state.mean)
        return self.out_proj(h.to(x.dtype)), MovingAverageState(mean)


register_layer("moving_average", MovingAverage)

if __name__ == "__main__":
    print(check_layer(MovingAverage(8)))
