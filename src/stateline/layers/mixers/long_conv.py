"""Long convolution: filters of any length that a small network computes from the position."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.layers.decoder import prepared
from stateline.layers.mixers.finite_filter import FiniteFilter
from stateline.layers.mixers.ssm_layer import SSMLayer
from stateline.layers.mixers.ssm_settings import FilterSettings, LongConvSettings
from stateline.ops.dispatch import own_precision
from stateline.ops.linear import rounds_products
from stateline.settings import Count

_SLOWEST, _FASTEST = 1.5, 0.3
"""Fraction of the filter after which the slowest and the fastest window are at 0.01."""


class ImplicitFilters(FiniteFilter):
    r"""Filters whose taps are a function of their position, one or more per channel.

    .. math::
        h_l = \mathrm{net}(z_l) \odot (e^{-\tau_l \delta} + s), \qquad
        y_t = \sum_{l < T} h_l\, x_{t-l} + D x_t

    with the time :math:`\tau_l = l / (T - 1)` of tap l of T, features :math:`z_l` (the time, and
    cosines and sines of 0 to (``n_features`` - 3) / 2 turns over the filter), a network with sines
    as nonlinearities, and rates :math:`\delta` spread evenly over all filters. The fastest window
    reaches 0.01 after 0.3 of the filter; the slowest is still at 0.046 where the filter ends.

    The output holds the first filter's signals of all channels, then the second filter's, and so
    on. Parameters and state stay float32 under a cast to half precision.

    Args:
        d_model: Number of channels.
        n_filters: Filters for each channel.
        **settings: See :class:`~stateline.layers.mixers.ssm_settings.FilterSettings`.

    Raises:
        InputError: If a size is too small or ``n_features`` is even.

    References:
        Poli et al., "Hyena Hierarchy", ICML 2023.
    """

    settings: FilterSettings
    keeps_float32 = True
    # As in the official Hyena code, no parameter of the filters decays.
    optimizer_groups: ClassVar[Mapping[str, str]] = {
        "features": "ssm",
        **dict.fromkeys(("frequency", "w_in", "b_in", "w_hidden", "b_hidden", "w_out"), "no_decay"),
    }
    times: Tensor
    rates: Tensor

    def __init__(self, d_model: int, *, n_filters: Count = 1, **settings: Any) -> None:
        its = self.settings
        outputs, hidden, level = n_filters * d_model, its.d_hidden, -math.log(0.01)
        super().__init__(d_model, outputs, **settings)
        self.filter_len = its.filter_len
        self.register_buffer("times", torch.linspace(0, 1, its.filter_len))
        self.register_buffer("rates", torch.linspace(level / _SLOWEST, level / _FASTEST, outputs))
        self.features = nn.Parameter(_features(its.filter_len, its.n_features))
        self.frequency = nn.Parameter(torch.full((hidden,), float(its.frequency)))
        self.w_in = _linear(hidden, its.n_features)
        self.b_in = _linear(hidden, fan_in=its.n_features)
        self.w_hidden = _linear(its.n_hidden, hidden, hidden)
        self.b_hidden = _linear(its.n_hidden, hidden, fan_in=hidden)
        self.w_out = _linear(outputs, hidden)
        self.skip = nn.Parameter(torch.randn(outputs))

    def flops_per_token(self, length: int) -> float:
        """The convolution of each output, and the network, shared by all tokens."""
        weights = self.w_in.numel() + self.w_hidden.numel() + self.w_out.numel()
        return super().flops_per_token(length) + 2.0 * weights * min(1, self.filter_len / length)

    @prepared
    def taps(self) -> Float[Tensor, "outputs filter_len"]:
        """All filters; the skip connection is added to the first tap."""
        return self.first_taps(self.filter_len)

    @override
    def first_taps(self, count: int) -> Float[Tensor, "outputs taps"]:
        layers = (self.w_in, self.b_in, self.w_hidden, self.b_hidden, self.w_out)
        values = _network(self.features[:count], *layers, self.frequency)
        windows = torch.exp(-self.times[:count, None] * self.rates) + self.settings.shift
        return (values * windows).mT + F.pad(self.skip[:, None], (0, values.shape[0] - 1))


class LongConv(SSMLayer):
    r"""Convolution with filters that a network computes from the position, then a map.

    .. math:: y = W\,\mathrm{gelu}(\mathrm{filters}(x)) + b

    It is S4D with free filters in place of state space models. They may have any shape, but end
    after ``filter_len`` taps; the state is the latest ``filter_len - 1`` inputs. Sequences may be
    longer than that.

    Args:
        d_model: Width of input and output.
        **settings: See :class:`~stateline.layers.mixers.ssm_settings.LongConvSettings`.

    Raises:
        InputError: If a setting does not fit.

    References:
        Poli et al., "Hyena Hierarchy", ICML 2023, for the filters, without Hyena's gates;
        Fathi et al., "Block-State Transformers", NeurIPS 2023, for several filters per channel.
    """

    settings: LongConvSettings

    def __init__(self, d_model: int, **settings: Any) -> None:
        filters = ImplicitFilters.with_settings(self.settings, d_model, **settings)
        super().__init__(filters, "linear")


def _features(filter_len: int, count: int) -> Float[Tensor, "filter_len count"]:
    """Time, and real and imaginary parts of waves of 0 to (count - 3) / 2 turns."""
    position = torch.arange(filter_len)
    device = position.device  # transformers computes linspace on the CPU while it builds on meta
    waves = torch.linspace(1e-4, (count - 3) / 2, (count - 1) // 2).to(device)
    time = torch.linspace(0, 1, filter_len).to(device)
    angle = 2 * math.pi * position[:, None] / filter_len * waves
    return torch.cat([time[:, None], angle.cos(), -angle.sin()], dim=-1)


def _linear(*shape: int, fan_in: int | None = None) -> nn.Parameter:
    """Weight or bias of a linear map, with PyTorch's initial distribution."""
    bound = 1 / math.sqrt(fan_in or shape[-1])
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


@own_precision
def _network(
    features: Float[Tensor, "filter_len feature"],
    w_in: Float[Tensor, "hidden feature"],
    b_in: Float[Tensor, " hidden"],
    w_hidden: Float[Tensor, "depth hidden hidden"],
    b_hidden: Float[Tensor, "depth hidden"],
    w_out: Float[Tensor, "outputs hidden"],
    frequency: Float[Tensor, " hidden"],
) -> Float[Tensor, "filter_len outputs"]:
    """A multilayer perceptron with sines; all layers share the factors inside them.

    Sines multiply rounding errors by their factors. So where PyTorch may round the factors of
    matrix products in float32 to fewer digits, they are computed in float64.
    """
    dtype = w_out.dtype
    if dtype == torch.float32 and rounds_products():
        given = (features, w_in, b_in, w_hidden, b_hidden, w_out, frequency)
        return _network(*(t.double() for t in given)).to(dtype)
    h = torch.sin(frequency * F.linear(features, w_in, b_in))
    for weight, bias in zip(w_hidden, b_hidden, strict=True):
        h = torch.sin(frequency * F.linear(h, weight, bias))
    return F.linear(h, w_out)
