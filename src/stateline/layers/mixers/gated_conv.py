"""Gated short convolution: the mixer of LFM2."""

from jaxtyping import Float
from torch import Tensor

from stateline.layers.base import AnyLayer
from stateline.layers.compose import Around
from stateline.layers.linear import Linear
from stateline.layers.mixers.short_conv import ShortConv
from stateline.settings import Count


class PlainConv(ShortConv):
    """A short convolution without a nonlinearity."""

    def finish(self, y: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Add the bias."""
        return y if self.bias is None else y + self.bias


class GatedConv(Around):
    r"""A short causal convolution between two gates.

    .. math::
        (b, c, u) = W_{\mathrm{in}} x, \qquad
        y_t = W_{\mathrm{out}} \Bigl( c_t \odot \sum_{s=0}^{K-1} k_s \odot (b \odot u)_{t-s} \Bigr)

    The state is the last K - 1 inputs of the convolution. Filter and state stay float32 under a
    cast to half precision.

    Args:
        d_model: Width of input and output.
        taps: Length K of the filter of each channel.
        bias: Whether the maps and the convolution have biases.

    Raises:
        InputError: If ``taps`` is not positive.

    References:
        Liquid AI, "LFM2 Technical Report", 2025; weights as in transformers.
    """

    def __init__(self, d_model: int, *, taps: Count = 3, bias: bool = False) -> None:
        super().__init__(d_model)
        self.taps, self.bias = taps, bias
        self.in_proj = Linear(d_model, [d_model] * 3, bias=bias)
        self.conv = PlainConv(d_model, taps=taps, bias=bias)
        self.out_proj = Linear(d_model, d_model, bias=bias)

    @property
    def inner(self) -> AnyLayer:
        """The convolution."""
        return self.conv

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gated input of the convolution, and the other gate."""
        b, c, u = self.in_proj(x).chunk(3, dim=-1)
        return b * u, c

    def leave(self, kept: Tensor, y: Tensor) -> Tensor:
        """Gate the output of the convolution, and map it."""
        return self.out_proj(kept * y)
