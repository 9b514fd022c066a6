"""Gated short convolution: the mixer of LFM2."""

from jaxtyping import Float
from torch import Tensor, nn

from stateline.layers.base import SequenceLayer
from stateline.layers.mixers.finite_filter import FiniteFilterState
from stateline.layers.mixers.short_conv import ShortConv


class PlainConv(ShortConv):
    """A short convolution without a nonlinearity."""

    def finish(self, y: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Add the bias."""
        return y if self.bias is None else y + self.bias


class GatedConv(SequenceLayer[FiniteFilterState]):
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

    def __init__(self, d_model: int, *, taps: int = 3, bias: bool = False) -> None:
        super().__init__(d_model)
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.conv = PlainConv(d_model, taps=taps, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> FiniteFilterState:  # noqa: ARG002
        """Zeros in place of past inputs."""
        return self.conv.init_state(batch_size)

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: FiniteFilterState
    ) -> tuple[Float[Tensor, "batch length d_model"], FiniteFilterState]:
        """Gate, filter after the past inputs, gate again."""
        b, c, u = self.in_proj(x).chunk(3, dim=-1)
        y, state = self.conv.forward_chunk(b * u, state)
        return self.out_proj(c * y), state

    def step(
        self, x: Float[Tensor, "batch d_model"], state: FiniteFilterState
    ) -> tuple[Float[Tensor, "batch d_model"], FiniteFilterState]:
        """Gate, weigh the latest inputs by the taps, gate again."""
        b, c, u = self.in_proj(x).chunk(3, dim=-1)
        y, state = self.conv.step(b * u, state)
        return self.out_proj(c * y), state

    def flops_per_token(self, length: int) -> float:
        """Linear maps and the convolution."""
        return super().flops_per_token(length) + self.conv.flops_per_token(length)
