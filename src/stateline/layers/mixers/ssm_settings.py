"""Settings of state space models, each written once: fields, defaults, checks."""

from dataclasses import dataclass
from typing import Literal

from stateline.errors import InputError
from stateline.ops.discretization import Discretization
from stateline.ops.hippo import Init
from stateline.settings import Count, Positive, Settings

Output = Literal["linear", "glu", "half_glu"]
RealTransform = Literal["exp", "none", "relu", "sigmoid", "softplus"]
Kernel = Literal["exp", "clip", "softmax"]


def check_steps(dt_min: float, dt_max: float) -> None:
    """Refuse limits from which no steps can be drawn."""
    if dt_min > dt_max:
        raise InputError(f"steps must have 0 < dt_min <= dt_max, got {dt_min=} and {dt_max=}")


@dataclass(frozen=True, kw_only=True)
class ChannelSSMSettings(Settings):
    """Settings of one state space model per channel.

    Attributes:
        d_state: Real size of each channel's state: ``d_state / 2`` complex modes.
        n_ssm: Number of different transitions; channel h uses number ``h % n_ssm``. By default
            every channel has its own.
        n_outputs: Signals read from the state of each channel, each by its own C and D.
        dt_min: Smallest initial step.
        dt_max: Largest initial step; steps are drawn log-uniformly.
    """

    d_state: int = 64
    n_ssm: Count | None = None
    n_outputs: Count = 1
    dt_min: Positive = 1e-3
    dt_max: Positive = 1e-1

    def __post_init__(self) -> None:
        if self.d_state < 2 or self.d_state % 2:
            raise InputError(f"d_state must be a positive even number, got d_state={self.d_state}")
        check_steps(self.dt_min, self.dt_max)

    def transitions(self, d_model: int) -> int:
        """Number of different transitions of a layer."""
        count = d_model if self.n_ssm is None else self.n_ssm
        if d_model % count:
            raise InputError(f"n_ssm must divide d_model, got n_ssm={self.n_ssm} and {d_model=}")
        return count


@dataclass(frozen=True, kw_only=True)
class DiagonalSettings(ChannelSSMSettings):
    r"""Settings of a diagonal state space model per channel.

    Attributes:
        init: Initial frequencies Im A: ``lin`` (:math:`\pi n`), ``inv`` or ``legs``; Re A starts at
            -1/2.
        discretization: ``zoh`` (zero-order hold) or ``bilinear``.
        real_transform: How Re A follows from its parameter p (``log_decay``): ``exp`` is
            :math:`-e^p`; ``relu`` (with a floor of 1e-4), ``sigmoid`` and ``softplus`` likewise;
            ``none`` is -p, which does not guarantee stability.
    """

    init: Init = "lin"
    discretization: Discretization = "bilinear"
    real_transform: RealTransform = "exp"


@dataclass(frozen=True, kw_only=True)
class S4DSettings(DiagonalSettings):
    """Settings of a diagonal state space model per channel, with the discretization of S4D."""

    discretization: Discretization = "zoh"


@dataclass(frozen=True, kw_only=True)
class S5Settings(Settings):
    """Settings of one state space model for all channels.

    Attributes:
        d_state: Size of the state in the basis of HiPPO.
        n_blocks: Number of HiPPO matrices on the diagonal of the initial transition; must divide
            ``d_state`` into even parts.
        conj_sym: Store one mode of each conjugate pair, which halves their number.
        discretization: ``zoh`` (zero-order hold) or ``bilinear``.
        clip_eigs: Keep the real parts of the transition below -1e-4.
        dt_min: Smallest initial step.
        dt_max: Largest initial step; steps are drawn log-uniformly.
    """

    d_state: int = 64
    n_blocks: Count = 1
    conj_sym: bool = True
    discretization: Discretization = "zoh"
    clip_eigs: bool = True
    dt_min: Positive = 1e-3
    dt_max: Positive = 1e-1

    def __post_init__(self) -> None:
        if self.d_state < 2 or self.d_state % (2 * self.n_blocks):
            raise InputError(
                "n_blocks must divide d_state into even parts, "
                f"got n_blocks={self.n_blocks} and d_state={self.d_state}"
            )
        check_steps(self.dt_min, self.dt_max)


@dataclass(frozen=True, kw_only=True)
class DSSSettings(Settings):
    r"""Settings of the state space model of DSS.

    Attributes:
        d_state: Number of complex modes, which all channels share.
        n_outputs: Signals read from the state of each channel.
        kernel: How Re Lambda follows from its parameter p: :math:`-e^p` for ``exp``, p but at most
            1e-4 for ``clip``, and p for ``softmax``.
        scale: Whether the kernel has the factor s; without it, s is 1.
        exp_frequency: Whether Im Lambda is :math:`e^p` of its parameter p.
        tie_dt: Whether the real and the imaginary part share one step per channel. Otherwise they
            start equal and are learned separately.
        filter_len: For ``softmax``: taps of the filter.
        dt_min: Smallest initial step.
        dt_max: Largest initial step; steps are drawn log-uniformly.
    """

    d_state: Count = 64
    n_outputs: Count = 1
    kernel: Kernel = "exp"
    scale: bool = True
    exp_frequency: bool = False
    tie_dt: bool = False
    filter_len: Count = 1024
    dt_min: Positive = 1e-3
    dt_max: Positive = 1e-1

    def __post_init__(self) -> None:
        if self.kernel == "softmax" and not self.scale:
            raise InputError(
                "kernel='softmax' always has the scale s: take kernel='exp' or 'clip' for "
                "scale=False"
            )
        check_steps(self.dt_min, self.dt_max)


@dataclass(frozen=True, kw_only=True)
class FilterSettings(Settings):
    """Settings of filters that a small network computes from the position.

    Attributes:
        filter_len: Taps T of each filter.
        n_features: Number of features of a position, odd and at least 3.
        d_hidden: Width of the network.
        n_hidden: Number of its hidden-to-hidden maps.
        frequency: Initial factor inside the sines; high frequencies allow sharp filters.
        shift: Value s that is added to the windows.
    """

    filter_len: Count = 1024
    n_features: int = 33
    d_hidden: Count = 64
    n_hidden: Count = 2
    frequency: float = 10.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.n_features < 3 or self.n_features % 2 == 0:
            raise InputError(
                f"n_features must be odd and at least 3, got n_features={self.n_features}"
            )


@dataclass(frozen=True, kw_only=True)
class LongConvSettings(FilterSettings):
    """Settings of filters that a small network computes, and their number.

    Attributes:
        n_filters: Filters for each channel.
    """

    n_filters: Count = 1
