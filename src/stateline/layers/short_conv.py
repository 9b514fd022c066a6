"""A short convolution and a nonlinearity: the part that Mamba and the delta rule share."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import SequenceLayer, zeros
from stateline.ops import short_conv, slide


class ShortConvState(NamedTuple):
    """The latest inputs, oldest first: one fewer than the filter has taps."""

    past: Float[Tensor, "batch past d_model"]


class ShortConv(SequenceLayer[ShortConvState]):
    r"""A causal filter of a few taps for each channel, then SiLU.

    .. math:: y_t = \mathrm{silu}\Bigl(b + \sum_{s=0}^{K-1} k_s \odot x_{t-s}\Bigr)

    Filter and state stay float32 under a cast to half precision.

    Args:
        d_model: Number of channels.
        taps: Length K of the filter.
        bias: Whether there is a bias.

    Raises:
        InputError: If ``taps`` is not positive.
    """

    keeps_float32 = True

    def __init__(self, d_model: int, *, taps: int = 4, bias: bool = True) -> None:
        super().__init__(d_model)
        if taps < 1:
            raise InputError(f"a filter needs at least 1 tap, got {taps}")
        bound = taps**-0.5
        self.kernel = nn.Parameter(torch.empty(d_model, taps).uniform_(-bound, bound))
        start = torch.empty(d_model).uniform_(-bound, bound) if bias else None
        self.bias = None if start is None else nn.Parameter(start)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> ShortConvState:  # noqa: ARG002
        """No input yet: zeros."""
        return ShortConvState(
            zeros(self.kernel, batch_size, self.kernel.shape[1] - 1, self.d_model)
        )

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Filter the sequence."""
        return self._activate(short_conv(x, self.kernel), x)

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: ShortConvState
    ) -> tuple[Float[Tensor, "batch length d_model"], ShortConvState]:
        """Filter the chunk after what came before it."""
        y = self._activate(short_conv(x, self.kernel, state.past), x)
        return y, ShortConvState(slide(state.past, x))

    def step(
        self, x: Float[Tensor, "batch d_model"], state: ShortConvState
    ) -> tuple[Float[Tensor, "batch d_model"], ShortConvState]:
        """Weigh the latest inputs."""
        reach = torch.cat([state.past, x[:, None].to(state.past.dtype)], dim=1)
        y = (reach * self.kernel.flip(-1).mT).sum(dim=1)
        return self._activate(y, x), ShortConvState(reach[:, 1:])

    def flops_per_token(self, length: int) -> float:  # noqa: ARG002
        """A multiply-add per tap and channel."""
        return 2.0 * self.kernel.numel()

    def _activate(self, y: Tensor, x: Tensor) -> Tensor:
        return F.silu(y if self.bias is None else y + self.bias).to(x.dtype)
