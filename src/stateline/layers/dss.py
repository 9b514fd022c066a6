"""DSS: a diagonal state space model whose kernel is a sum, or a softmax, of exponentials."""

from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from stateline.errors import InputError, unknown_name
from stateline.layers.base import SequenceLayer, StateT
from stateline.layers.derived import derived
from stateline.layers.diagonal_ssm import DiagonalRecurrence, DiagonalSSMState, uniform_log_dt
from stateline.layers.finite_filter import FiniteFilter, FiniteFilterState
from stateline.layers.ssm_layer import Output, SSMLayer
from stateline.ops import diagonal_ssm
from stateline.ops.hippo import normal_form
from stateline.ops.planes import divide, exponential_minus_one, multiply

Kernel = Literal["exp", "clip", "softmax"]

_MOST = 1e-4
"""Largest real part that ``clip`` leaves."""

_EPSILON = 1e-7
"""What keeps the softmax finite where its sum is zero."""


class DSSModes(SequenceLayer[StateT]):
    r"""The parameters of the kernels of DSS: N complex modes, of which none stands for a pair.

    All channels share the modes' :math:`\Lambda`; each has steps and weights W of its own.
    Abstract: it does not say how the kernel is applied. See :class:`DSS` for the arguments.
    """

    c: Float[Tensor, "output mode 2"]
    skip: Float[Tensor, " output"]
    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("log_dt", "real", "frequency"), "ssm"
    )

    def __init__(  # noqa: PLR0913
        self,
        d_model: int,
        *,
        kernel: Kernel,
        d_state: int,
        n_outputs: int,
        scale: bool,
        exp_frequency: bool,
        tie_dt: bool,
        filter_len: int,
        dt_min: float,
        dt_max: float,
    ) -> None:
        super().__init__(d_model)
        if min(d_state, n_outputs, filter_len) < 1:
            raise InputError(
                "d_state, n_outputs and filter_len must be at least 1, got "
                f"{d_state=}, {n_outputs=} and {filter_len=}"
            )
        if kernel == "softmax" and not scale:
            raise InputError("a softmax is a scale: take kernel='exp' or 'clip' for scale=False")
        self.kernel, self.scale = kernel, scale
        self.exp_frequency, self.filter_len = exp_frequency, filter_len
        real = torch.full((d_state,), 0.5)
        frequency = -normal_form("legs", 2 * d_state).values[:, 1]
        outputs = n_outputs * d_model
        self.log_dt = nn.Parameter(uniform_log_dt(dt_min, dt_max, d_model, 1 if tie_dt else 2))
        self.real = nn.Parameter(real.log() if kernel == "exp" else -real)
        self.frequency = nn.Parameter(torch.empty(d_state))
        with torch.no_grad():
            self.frequency.copy_(frequency.log() if exp_frequency else frequency)
        self.c = nn.Parameter(torch.randn(outputs, d_state, 2))
        self.skip = nn.Parameter(torch.randn(outputs))

    def modes(self) -> tuple[Float[Tensor, "mode 2"], Float[Tensor, "d_model mode 2"]]:
        """Lambda, and its parts times the steps."""
        real = -self.real.exp() if self.kernel == "exp" else self.real
        if self.kernel == "clip":
            real = real.clamp(max=_MOST)
        frequency = self.frequency.exp() if self.exp_frequency else self.frequency
        spectrum = torch.stack([real, frequency], dim=-1)
        return spectrum, self.log_dt.exp()[:, None] * spectrum


class DSSRecurrence(DSSModes[DiagonalSSMState], DiagonalRecurrence):
    """The kernels ``exp`` and ``clip``, which are recurrences."""

    @derived
    def discretize(
        self,
    ) -> tuple[
        Float[Tensor, "d_model mode 2"],
        Float[Tensor, "d_model mode 2"],
        Float[Tensor, "output mode 2"],
    ]:
        """Logarithm of the transition, input vector and output vector of the recurrence."""
        spectrum, log_a = self.modes()
        one = torch.tensor([1.0, 0.0], dtype=log_a.dtype, device=log_a.device)
        gain = divide(exponential_minus_one(log_a), spectrum) if self.scale else one
        # Halved, because the operator counts every mode twice, for its conjugate.
        return log_a, gain.expand_as(log_a), self.c / 2


class DSSFilter(DSSModes[FiniteFilterState], FiniteFilter):
    """The kernel ``softmax``, which is a filter of ``filter_len`` taps."""

    @derived
    def taps(self) -> Float[Tensor, "output filter_len"]:
        """The filters: a softmax over time of each mode's exponentials, weighted and summed."""
        spectrum, log_a = self.modes()
        rising = (spectrum[:, :1] > 0).to(log_a.dtype)
        # Modes that grow are followed backward from the last tap, so that nothing overflows: all
        # fractions are then those of -Delta.
        falling = log_a * (1 - 2 * rising)
        total = multiply(exponential_minus_one(self.filter_len * falling), spectrum)
        weight = multiply(exponential_minus_one(falling), _reciprocal(total))
        impulse = pad(self.log_dt.new_ones(1, self.d_model), (0, 0, 0, self.filter_len - 1))
        c = torch.cat([self.c * (1 - rising), self.c * rising]) / 2  # counted twice by the operator
        forward, backward = diagonal_ssm(impulse, falling, weight, c).mT.chunk(2)
        return forward + backward.flip(-1) + pad(self.skip[:, None], (0, self.filter_len - 1))


def _reciprocal(z: Float[Tensor, "*shape 2"]) -> Float[Tensor, "*shape 2"]:
    """One over z, nearly: finite at zero."""
    conjugate = torch.stack([z[..., 0], -z[..., 1]], dim=-1)
    return conjugate / (z.square().sum(dim=-1, keepdim=True) + _EPSILON)


class DSS(SSMLayer):
    r"""Diagonal state space layer with exponentials, or a softmax of them, for its kernel.

    .. math::
        y = W_o\,\mathrm{gelu}(k * x + D x) + b, \qquad
        k_l = \mathrm{Re} \sum_n W_n\, s_n\, e^{\Delta_n l}, \qquad
        \Delta = \mathrm{dt}_1 \mathrm{Re}\Lambda + i\,\mathrm{dt}_2 \mathrm{Im}\Lambda

    with :math:`s = (e^\Delta - 1)/\Lambda` for the kernels ``exp`` and ``clip``, and
    :math:`s = (e^\Delta - 1) / (\Lambda (e^{\Delta T} - 1))` for ``softmax`` over T taps. The first
    two are recurrences, with a state of constant size. The softmax has no recurrence for any
    length, and allows modes that grow: it is a filter of ``filter_len`` taps, whose state is as
    many inputs.

    Args:
        d_model: Number of channels.
        d_state: Number of complex modes, which all channels share.
        n_outputs: Signals read from the state of each channel, before the map.
        kernel: ``exp``: Re Lambda is :math:`-e^p` of its parameter p. ``clip``: it is its
            parameter, cut at 1e-4. ``softmax``: it is its parameter.
        scale: Whether the factor s is there; without, it is 1.
        exp_frequency: Whether Im Lambda is :math:`e^p` of its parameter p, too.
        tie_dt: Whether the real and the imaginary part have the same step.
        filter_len: For ``softmax``: taps of the filter.
        dt_min: Smallest initial step.
        dt_max: Largest initial step; steps are drawn log-uniformly.
        output: The map across channels: ``linear``, ``glu`` or ``half_glu``.

    Raises:
        InputError: If a size is not positive, the steps are not ``0 < dt_min <= dt_max``, the
            kernel is unknown, or is a softmax without scale.

    References:
        Gupta et al., "Diagonal State Spaces are as Effective as Structured State Spaces", NeurIPS
        2022; the variants are those of its official code.
    """

    def __init__(  # noqa: PLR0913
        self,
        d_model: int,
        *,
        d_state: int = 64,
        n_outputs: int = 1,
        kernel: Kernel = "exp",
        scale: bool = True,
        exp_frequency: bool = False,
        tie_dt: bool = False,
        filter_len: int = 1024,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        output: Output = "linear",
    ) -> None:
        if kernel not in get_args(Kernel):
            raise unknown_name("kernel", kernel, get_args(Kernel))
        made = DSSFilter if kernel == "softmax" else DSSRecurrence
        ssm = made(
            d_model,
            kernel=kernel,
            d_state=d_state,
            n_outputs=n_outputs,
            scale=scale,
            exp_frequency=exp_frequency,
            tie_dt=tie_dt,
            filter_len=filter_len,
            dt_min=dt_min,
            dt_max=dt_max,
        )
        super().__init__(ssm, n_outputs * d_model, output)
