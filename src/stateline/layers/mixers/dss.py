"""DSS: a diagonal state space model whose kernel sums exponentials, or softmaxes of them."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from stateline.layers.base import SequenceLayer, StateT
from stateline.layers.decoder import prepared
from stateline.layers.mixers.diagonal_ssm import DiagonalRecurrence, DiagonalSSMState
from stateline.layers.mixers.finite_filter import FiniteFilter, FiniteFilterState
from stateline.layers.mixers.ssm_layer import SSMLayer
from stateline.layers.mixers.ssm_settings import DSSSettings, Output
from stateline.layers.mixers.step_sizes import uniform_log_dt
from stateline.ops import DiagonalWeights, diagonal_ssm
from stateline.ops.hippo import normal_form
from stateline.ops.planes import conjugate, divide, exponential_minus_one, multiply


class DSSModes(SequenceLayer[StateT]):
    r"""The parameters of the kernels of DSS: N complex modes, without conjugates.

    All channels share the :math:`\Lambda` of the modes; each channel has its own steps and weights
    W. Abstract: subclasses say how the kernel is applied.
    """

    settings: DSSSettings
    c: Float[Tensor, "output mode 2"]
    skip: Float[Tensor, " output"]
    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("log_dt", "real", "frequency"), "ssm"),
        "c": "no_decay",
    }

    def __init__(self, d_model: int) -> None:
        its = self.settings
        modes, outputs = its.d_state, its.n_outputs * d_model
        super().__init__(d_model, outputs)
        self.filter_len = its.filter_len
        real = torch.full((modes,), 0.5)
        frequency = -normal_form("legs", 2 * modes).values[:, 1]
        frequency = frequency.log() if its.exp_frequency else frequency
        # As in the official code, the real and the imaginary part start with the same step.
        log_dt = uniform_log_dt(its.dt_min, its.dt_max, d_model, 1)
        self.log_dt = nn.Parameter(log_dt if its.tie_dt else log_dt.repeat(1, 2))
        self.real = nn.Parameter(real.log() if its.kernel == "exp" else -real)
        self.frequency = nn.Parameter(torch.empty(modes).copy_(frequency))
        self.c = nn.Parameter(torch.randn(outputs, modes, 2))
        self.skip = nn.Parameter(torch.randn(outputs))

    def modes(self) -> tuple[Float[Tensor, "mode 2"], Float[Tensor, "d_model mode 2"]]:
        """Lambda, and Delta: its real and imaginary parts times the steps."""
        real = -self.real.exp() if self.settings.kernel == "exp" else self.real
        if self.settings.kernel == "clip":
            real = real.clamp(max=1e-4)
        frequency = self.frequency.exp() if self.settings.exp_frequency else self.frequency
        spectrum = torch.stack([real, frequency], dim=-1)
        return spectrum, self.log_dt.exp()[:, None] * spectrum


class DSSRecurrence(DSSModes[DiagonalSSMState], DiagonalRecurrence):
    """The kernels ``exp`` and ``clip``, computed as recurrences."""

    @prepared
    def weights(self) -> DiagonalWeights:
        """Logarithm of the transition, input vector and output vector of the recurrence."""
        spectrum, log_a = self.modes()
        one = torch.tensor([1.0, 0.0], dtype=log_a.dtype, device=log_a.device)
        gain = divide(exponential_minus_one(log_a), spectrum) if self.settings.scale else one
        # Halved, because the op counts each mode twice, for its conjugate.
        return DiagonalWeights(log_a, gain.expand_as(log_a), self.c / 2)


class DSSFilter(DSSModes[FiniteFilterState], FiniteFilter):
    """The kernel ``softmax``, computed as a filter of ``filter_len`` taps."""

    def flops_per_token(self, length: int) -> float:
        """The convolution, and the kernels of falling and rising modes, shared by all tokens."""
        kernels = 2 * 4.0 * self.c.shape[0] * self.c.shape[1] * self.filter_len
        return super().flops_per_token(length) + kernels / length

    @prepared
    def taps(self) -> Float[Tensor, "output filter_len"]:
        """The weighted sum of each mode's softmax over time."""
        spectrum, log_a = self.modes()
        rising = (spectrum[:, :1] > 0).to(log_a.dtype)
        # Growing modes are computed backward from the last tap, with -Delta, to avoid overflow.
        falling = log_a * (1 - 2 * rising)
        total = multiply(exponential_minus_one(self.filter_len * falling), spectrum)
        # About 1 / total, but finite where it is zero.
        inverse = conjugate(total) / (total.square().sum(dim=-1, keepdim=True) + 1e-7)
        weight = multiply(exponential_minus_one(falling), inverse)
        impulse = pad(self.log_dt.new_ones(1, self.d_model), (0, 0, 0, self.filter_len - 1))
        c = torch.cat([self.c * (1 - rising), self.c * rising]) / 2  # the op counts each mode twice
        response, _ = diagonal_ssm(impulse, DiagonalWeights(falling, weight, c))
        forward, backward = response.mT.chunk(2)
        return forward + backward.flip(-1) + pad(self.skip[:, None], (0, self.filter_len - 1))


class DSS(SSMLayer):
    r"""Diagonal state space layer whose kernel sums exponentials, or softmaxes of them.

    .. math::
        y = W_o\,\mathrm{gelu}(k * x + D x) + b, \qquad
        k_l = \mathrm{Re} \sum_n W_n\, s_n\, e^{\Delta_n l}, \qquad
        \Delta = \mathrm{dt}_1 \mathrm{Re}\Lambda + i\,\mathrm{dt}_2 \mathrm{Im}\Lambda

    with :math:`s = (e^\Delta - 1)/\Lambda` for the kernels ``exp`` and ``clip``, and
    :math:`s = (e^\Delta - 1) / (\Lambda (e^{\Delta T} - 1))` for ``softmax`` over T taps. The first
    two are recurrences with a state of constant size. The softmax depends on T, so it has no
    recurrence, and its modes may grow: it is a filter of ``filter_len`` taps, whose state is the
    latest ``filter_len - 1`` inputs. W has no weight decay, as in the official code.

    Args:
        d_model: Number of channels.
        output: The map across channels: ``linear``, ``glu`` or ``half_glu``.
        **settings: See :class:`~stateline.layers.mixers.ssm_settings.DSSSettings`.

    Raises:
        InputError: If a size is not positive, the steps are not ``0 < dt_min <= dt_max``, the
            kernel is unknown, or is a softmax without scale.

    References:
        Gupta et al., "Diagonal State Spaces are as Effective as Structured State Spaces", NeurIPS
        2022, with the variants of its official code.
    """

    settings: DSSSettings

    def __init__(self, d_model: int, *, output: Output = "linear", **settings: Any) -> None:
        kind = DSSFilter if self.settings.kernel == "softmax" else DSSRecurrence
        super().__init__(kind.with_settings(self.settings, d_model, **settings), output)
