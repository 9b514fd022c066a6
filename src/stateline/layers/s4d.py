"""S4D: a diagonal state space model per channel, then a map across channels."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stateline.layers.base import SequenceLayer
from stateline.layers.diagonal_ssm import DiagonalSSM, DiagonalSSMState, Discretization
from stateline.ops.hippo import Init


class S4D(SequenceLayer[DiagonalSSMState]):
    r"""Diagonal state space layer: :math:`y = W\,\mathrm{gelu}(\mathrm{SSM}(x)) + b`.

    Linear in time with fixed coefficients: it remembers well, but cannot choose what to remember by
    what it reads. The state has a constant size.

    Args:
        d_model: Number of channels.
        d_state: Real size of each channel's state.
        init: ``lin``, ``inv`` or ``legs``: see :class:`DiagonalSSM`.
        discretization: ``zoh`` or ``bilinear``.
        dt_min: Smallest initial step.
        dt_max: Largest initial step.

    References:
        Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models",
        NeurIPS 2022. As a mixer beside a feed-forward: the S4D baseline of Fu et al., 2023.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        init: Init = "lin",
        discretization: Discretization = "zoh",
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
    ) -> None:
        super().__init__(d_model)
        self.ssm = DiagonalSSM(
            d_model,
            d_state=d_state,
            init=init,
            discretization=discretization,
            dt_min=dt_min,
            dt_max=dt_max,
        )
        self.out_proj = nn.Linear(d_model, d_model)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> DiagonalSSMState:
        """State of the state space models."""
        return self.ssm.init_state(batch_size, capacity=capacity)

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Convolve, then mix the channels."""
        return self.out_proj(F.gelu(self.ssm(x)))

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: DiagonalSSMState
    ) -> tuple[Float[Tensor, "batch length d_model"], DiagonalSSMState]:
        """Convolve after the state, then mix the channels."""
        y, state = self.ssm.forward_chunk(x, state)
        return self.out_proj(F.gelu(y)), state

    def step(
        self, x: Float[Tensor, "batch d_model"], state: DiagonalSSMState
    ) -> tuple[Float[Tensor, "batch d_model"], DiagonalSSMState]:
        """Advance the recurrence, then mix the channels."""
        y, state = self.ssm.step(x, state)
        return self.out_proj(F.gelu(y)), state

    def flops_per_token(self, length: int) -> float:
        """The convolution and the map."""
        return super().flops_per_token(length) + self.ssm.flops_per_token(length)
