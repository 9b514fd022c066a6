"""Hyena: a long convolution between two gates."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from stateline.layers.base import AnyLayer, flops_inside
from stateline.layers.compose import Composite
from stateline.layers.linear import Linear
from stateline.layers.mixers.gated_conv import PlainConv
from stateline.layers.mixers.long_conv import ImplicitFilters
from stateline.layers.mixers.ssm_settings import FilterSettings
from stateline.settings import Count


class Hyena(Composite):
    r"""A long convolution between two gates, all three after a short convolution (order 2).

    .. math::
        (g, k, v) = \mathrm{short}(W_{\mathrm{in}} x + b_{\mathrm{in}}), \qquad
        y_t = W_{\mathrm{out}} \Bigl( g_t \odot \sum_{l < T} h_l \odot (k \odot v)_{t-l} \Bigr)
        + b_{\mathrm{out}}

    The short convolution has K taps and a bias for each channel. The taps :math:`h_l` are those of
    :class:`~stateline.layers.mixers.long_conv.ImplicitFilters`, with the skip connection in
    :math:`h_0`. Filters and states stay float32 under a cast to half precision.

    Differs from the official code: the filters have ``filter_len`` taps whatever the length of the
    sequence, which may be longer. So the layer can be computed in chunks and steps; its state is
    the latest K - 1 and ``filter_len - 1`` inputs of the two convolutions.

    Args:
        d_model: Width of input and output.
        d_conv: Taps K of the short convolution.
        **settings: Settings of the long filters, of T = ``filter_len`` taps: see
            :class:`~stateline.layers.mixers.ssm_settings.FilterSettings`.

    Raises:
        InputError: If a size is too small or ``n_features`` is even.

    References:
        Poli et al., "Hyena Hierarchy: Towards Larger Convolutional Language Models", ICML 2023,
        section 3.
    """

    settings: FilterSettings

    def __init__(self, d_model: int, *, d_conv: Count = 3, **settings: Any) -> None:
        super().__init__(d_model, **settings)
        self.in_proj = Linear(d_model, [d_model] * 3)
        self.conv = PlainConv(3 * d_model, taps=d_conv)
        self.filters = ImplicitFilters.with_settings(self.settings, d_model)
        self.out_proj = Linear(d_model, d_model)

    @property
    def links(self) -> Sequence[AnyLayer]:
        """The short convolution, then the long one."""
        return self.conv, self.filters

    def run_links(self, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        """Convolve, gate, convolve, gate."""
        gate, k, v = call(self.conv, self.in_proj(x)).chunk(3, dim=-1)
        return self.out_proj(gate * call(self.filters, k * v))

    def flops_per_token(self, length: int) -> float:
        """Linear maps and both convolutions."""
        return flops_inside(self, length)
