"""Long convolution: filters of any length, given by a small network of the position."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.derived import derived
from stateline.layers.finite_filter import FiniteFilter
from stateline.layers.ssm_layer import SSMLayer
from stateline.ops.backend import own_precision

_SLOWEST, _FASTEST = 1.5, 0.3
"""Within which part of the filter the slowest and the fastest window decay to 0.01."""


class ImplicitFilters(FiniteFilter):
    r"""Filters whose taps are a function of their position; several for each channel.

    .. math::
        h_l = \mathrm{net}(z_l) \odot (e^{-\tau_l \delta} + s), \qquad
        y_t = \sum_{l < T} h_l\, x_{t-l} + D x_t

    with the time :math:`\tau_l = l / (T - 1)` of tap l of T, features :math:`z_l` (the time, and
    waves of up to half of ``n_features`` turns over the filter), a network with sines for
    nonlinearities, and rates :math:`\delta` spread evenly over all filters: the fastest window is
    at 0.01 after 0.3 of the filter, the slowest would be after 1.5 of it. So what is cut off beyond
    T taps is not negligible: there the slowest window is still at 0.046.

    The output is as wide as ``n_filters`` inputs: all channels of the first filter, then of the
    second, and so on. Parameters and state stay float32 under a cast to half precision.

    Args:
        d_model: Number of channels.
        n_filters: Filters for each channel.
        filter_len: Taps T of each filter.
        n_features: Number of features, odd and at least 3.
        d_hidden: Width of the network.
        n_hidden: Number of its maps from hidden to hidden units.
        frequency: Initial factor inside the sines: high frequencies allow sharp filters.
        shift: Where the windows end: s.

    Raises:
        InputError: If a size is too small or ``n_features`` is even.

    References:
        Poli et al., "Hyena Hierarchy", ICML 2023.
    """

    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = {"features": "ssm"}
    times: Tensor
    rates: Tensor

    def __init__(
        self,
        d_model: int,
        *,
        n_filters: int = 1,
        filter_len: int = 1024,
        n_features: int = 33,
        d_hidden: int = 64,
        n_hidden: int = 2,
        frequency: float = 10.0,
        shift: float = 0.0,
    ) -> None:
        super().__init__(d_model)
        if min(n_filters, filter_len, d_hidden, n_hidden) < 1:
            raise InputError(
                "n_filters, filter_len, d_hidden and n_hidden must be at least 1, got "
                f"{n_filters=}, {filter_len=}, {d_hidden=} and {n_hidden=}"
            )
        if n_features < 3 or n_features % 2 == 0:
            raise InputError(f"n_features must be odd and at least 3, got {n_features=}")
        self.filter_len, self.shift = filter_len, shift
        outputs, level = n_filters * d_model, -math.log(0.01)
        self.register_buffer("times", torch.linspace(0, 1, filter_len))
        self.register_buffer("rates", torch.linspace(level / _SLOWEST, level / _FASTEST, outputs))
        self.features = nn.Parameter(_features(filter_len, n_features))
        self.frequency = nn.Parameter(torch.full((d_hidden,), float(frequency)))
        self.w_in, self.b_in = _linear(d_hidden, n_features), _linear(d_hidden, fan_in=n_features)
        self.w_hidden = _linear(n_hidden, d_hidden, d_hidden)
        self.b_hidden = _linear(n_hidden, d_hidden, fan_in=d_hidden)
        self.w_out = _linear(outputs, d_hidden)
        self.skip = nn.Parameter(torch.randn(outputs))

    def flops_per_token(self, length: int) -> float:
        """The convolution of each output, and the network's share."""
        weights = self.w_in.numel() + self.w_hidden.numel() + self.w_out.numel()
        return super().flops_per_token(length) + 2.0 * self.filter_len * weights / length

    @derived
    def taps(self) -> Float[Tensor, "outputs filter_len"]:
        """All filters; the skip connection adds to their first tap."""
        layers = (self.w_in, self.b_in, self.w_hidden, self.b_hidden, self.w_out)
        values = _network(self.features, *layers, self.frequency)
        windows = torch.exp(-self.times[:, None] * self.rates) + self.shift
        first = F.pad(self.skip[:, None], (0, self.filter_len - 1))
        return (values * windows).mT + first


class LongConv(SSMLayer):
    r"""Convolution with filters that a network of the position gives, then a map across channels.

    .. math:: y = W\,\mathrm{gelu}(\mathrm{filters}(x)) + b

    It is S4D with free filters in place of state space models. They may have any shape, but end
    after ``filter_len`` taps, and their state is all inputs that they reach: constant, and large.
    No length is refused.

    Args:
        d_model: Width of input and output.
        n_filters: Filters for each channel.
        filter_len: Taps of each filter: how far back the layer sees.
        n_features: Number of features of a position; see :class:`ImplicitFilters`.
        d_hidden: Width of the network.
        n_hidden: Number of its maps from hidden to hidden units.
        frequency: Initial factor inside its sines.
        shift: Where the windows end.

    References:
        Poli et al., "Hyena Hierarchy", ICML 2023, for the filters, without Hyena's gates;
        Fathi et al., "Block-State Transformers", NeurIPS 2023, for several of them.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_filters: int = 1,
        filter_len: int = 1024,
        n_features: int = 33,
        d_hidden: int = 64,
        n_hidden: int = 2,
        frequency: float = 10.0,
        shift: float = 0.0,
    ) -> None:
        filters = ImplicitFilters(
            d_model,
            n_filters=n_filters,
            filter_len=filter_len,
            n_features=n_features,
            d_hidden=d_hidden,
            n_hidden=n_hidden,
            frequency=frequency,
            shift=shift,
        )
        super().__init__(filters, n_filters * d_model, "linear")


def _features(filter_len: int, count: int) -> Float[Tensor, "filter_len count"]:
    """Time, and real and imaginary parts of waves of 0 to (count - 3) / 2 turns."""
    position = torch.arange(filter_len)
    waves = torch.linspace(1e-4, (count - 3) / 2, (count - 1) // 2)
    angle = 2 * math.pi * position[:, None] / filter_len * waves
    return torch.cat([torch.linspace(0, 1, filter_len)[:, None], angle.cos(), -angle.sin()], dim=-1)


def _linear(*shape: int, fan_in: int | None = None) -> nn.Parameter:
    """Weight or bias of a linear map, as PyTorch draws them."""
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
    """A multilayer perceptron with sines, whose factors all layers share."""
    h = torch.sin(frequency * F.linear(features, w_in, b_in))
    for weight, bias in zip(w_hidden, b_hidden, strict=True):
        h = torch.sin(frequency * F.linear(h, weight, bias))
    return F.linear(h, w_out)
