"""A short convolution and a nonlinearity, as in Mamba and the gated delta net."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stateline.layers.mixers.finite_filter import FiniteFilter
from stateline.settings import Count


class ShortConv(FiniteFilter):
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
    resets = None  # type: ignore[assignment]  # every backend reads documents

    def __init__(self, d_model: int, *, taps: Count = 4, bias: bool = True) -> None:
        super().__init__(d_model)
        self.filter_len = taps
        bound = taps**-0.5
        self.kernel = nn.Parameter(torch.empty(d_model, taps).uniform_(-bound, bound))
        start = torch.empty(d_model).uniform_(-bound, bound) if bias else None
        self.bias = None if start is None else nn.Parameter(start)

    def taps(self) -> Float[Tensor, "d_model taps"]:
        """The learned filter."""
        return self.kernel

    def finish(self, y: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Add the bias and apply SiLU."""
        return F.silu(y if self.bias is None else y + self.bias)

    def flops_per_token(self, length: int) -> float:  # noqa: ARG002
        """A multiply-add per tap and channel."""
        return 2.0 * self.kernel.numel()
