"""Diagonal state space models per channel, which S4D, H3 and others contain."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.layers.base import SequenceLayer, accumulates, records, zeros
from stateline.layers.decoder import prepared
from stateline.layers.documents import Documents
from stateline.layers.mixers.ssm_settings import DiagonalSettings, RealTransform
from stateline.layers.mixers.step_sizes import uniform_log_dt
from stateline.ops import (
    DiagonalWeights,
    diagonal_ssm,
    diagonal_ssm_every,
    diagonal_ssm_step,
    diagonal_ssm_stepper,
    discretize,
)
from stateline.ops.convolution import skipped
from stateline.ops.diagonal_ssm import MOST_MODES, OP
from stateline.ops.dispatch import kernels_run
from stateline.ops.fft_conv import convolution_flops
from stateline.ops.hippo import diagonal_frequencies
from stateline.ops.stepping import Stepper

_LEAST = 1e-4
_DECAYS: Mapping[RealTransform, tuple[Callable[[Tensor], Tensor], float]] = {
    "exp": (torch.exp, math.log(0.5)),
    "none": (lambda p: p, 0.5),
    "relu": (lambda p: F.relu(p) + _LEAST, 0.5 - _LEAST),
    "sigmoid": (torch.sigmoid, 0.0),
    "softplus": (F.softplus, math.log(math.expm1(0.5))),
}
"""How the decay -Re A follows from its parameter, and the parameter that gives a decay of 1/2."""


@accumulates("h")
class DiagonalSSMState(NamedTuple):
    """Complex modes of every channel, as planes."""

    h: Float[Tensor, "*batch channel mode 2"]


class Operators(NamedTuple):
    """The ops that compute one kind of state space model."""

    response: Callable[..., tuple[Tensor, Any]]
    every: Callable[..., Tensor]
    step: Callable[..., tuple[Tensor, Tensor]]


class ChannelSSM(SequenceLayer[DiagonalSSMState]):
    """A linear state space model for each channel, with a skip connection.

    Abstract: subclasses say which ops compute it, and from which weights. Inputs may have any
    number of batch axes. All parameters and the state stay float32 under a cast to half precision.

    Attributes:
        operators: The ops; each takes the input and the weights first.
        c: Output vectors of ``n_outputs`` readouts of every channel; subclasses define them.
        skip: Weight of each channel's input in each output; subclasses define it.
    """

    keeps_float32 = True
    any_batch_axes = True
    operators: ClassVar[Operators]
    c: Float[Tensor, "output mode 2"]
    skip: Float[Tensor, " output"]

    @abstractmethod
    def weights(self) -> tuple[Tensor, ...]:
        """Weights of the state space models, as the ops take them."""

    def init_state(self, batch_size: int, *, capacity: int = 0) -> DiagonalSSMState:  # noqa: ARG002
        """Zero state."""
        return DiagonalSSMState(zeros(self.c, batch_size, self.d_model, *self.c.shape[1:]))

    def resets(self, x: Tensor, state: DiagonalSSMState | None = None) -> bool:  # noqa: ARG002
        """Not by a convolution."""
        return False

    @override
    def forward(self, x: Tensor, starts: Documents | None = None) -> Tensor:
        packed = {} if starts is None else {"starts": starts.mask}
        return self.operators.response(x, self.weights(), **packed)[0] + skipped(x, self.skip)

    def every(
        self, x: Float[Tensor, "*batch length d_model"], stride: int
    ) -> Float[Tensor, "*batch taken output"]:
        """Outputs at positions stride - 1, 2 stride - 1, ... only, at lower cost."""
        y = self.operators.every(x, self.weights(), stride)
        return y + skipped(x[..., stride - 1 :: stride, :], self.skip)

    @override
    def forward_chunk(
        self, x: Tensor, state: DiagonalSSMState, starts: Documents | None = None
    ) -> tuple[Tensor, DiagonalSSMState]:
        packed = {} if starts is None else {"starts": starts.mask}
        y, h = self.operators.response(x, self.weights(), state.h, **packed)
        return y + skipped(x, self.skip), DiagonalSSMState(h)

    @override
    def step(self, x: Tensor, state: DiagonalSSMState) -> tuple[Tensor, DiagonalSSMState]:
        y, h = self.operators.step(x, self.weights(), state.h)
        return y + skipped(x, self.skip), DiagonalSSMState(h)

    @abstractmethod
    def flops_of_every(self, stride: int, length: int) -> float:
        """Operations of ``every`` per token."""


class DiagonalRecurrence(ChannelSSM):
    """A diagonal linear recurrence for each channel, with a skip connection.

    Abstract: subclasses say from which parameters the coefficients follow.
    """

    operators = Operators(diagonal_ssm, diagonal_ssm_every, diagonal_ssm_step)

    @abstractmethod
    def weights(self) -> DiagonalWeights:
        """Logarithm of the transition, input vector and output vector of the recurrence."""

    def resets(self, x: Tensor, state: DiagonalSSMState | None = None) -> bool:  # noqa: ARG002
        """Whether the kernels take documents."""
        device = x.device.type
        return kernels_run(OP, device) and (device == "cpu" or self.c.shape[1] <= MOST_MODES)

    @override
    def step_(self, x: Tensor, state: DiagonalSSMState) -> Tensor:
        if not self.decodes and records(x):
            return super().step_(x, state)
        return self.stepper()(x, state.h)

    @prepared
    def stepper(self) -> Stepper:
        """Steps in place, with the present weights."""
        return diagonal_ssm_stepper(self.weights(), self.skip)

    def flops_of_every(self, stride: int, length: int) -> float:  # noqa: ARG002
        """Each input for all modes, and each output once per stride."""
        return 4.0 * self.c.shape[1] * (self.d_model + len(self.c) / stride)

    def flops_per_token(self, length: int) -> float:
        """The convolution of each output, and its share of the kernel."""
        return len(self.c) * (convolution_flops(length) + 4.0 * self.c.shape[1])


class DiagonalSSM(DiagonalRecurrence):
    r"""A diagonal state space model for each channel, with a skip connection.

    .. math:: \dot x = A x + B u, \qquad y = 2\,\mathrm{Re}(C x) + D u

    is discretised with a step dt for each channel. Zero-order hold (``zoh``) gives
    :math:`\bar A = e^{z}`, :math:`\bar B = (e^{z} - 1) B / A` with :math:`z = \mathrm{dt}\, A`; the
    bilinear rule gives :math:`\bar A = (1 + z/2) / (1 - z/2)` and
    :math:`\bar B = \mathrm{dt}\, B / (1 - z/2)`. Training convolves with the kernel
    :math:`2\,\mathrm{Re} \sum_n C_n {\bar B}_n {\bar A}_n^t`.

    All parameters and the state stay float32 under a cast to half precision. Inputs may have any
    number of batch axes. With several outputs, the output holds the first signals of all channels,
    then the second ones, and so on.

    Args:
        d_model: Number of channels.
        **settings: See :class:`~stateline.layers.mixers.ssm_settings.DiagonalSettings`.

    Raises:
        InputError: If ``d_state`` is not a positive even number, ``n_ssm`` does not divide
            ``d_model``, ``n_outputs`` is not positive, the steps are not ``0 < dt_min <= dt_max``,
            or a name is unknown.

    References:
        Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models",
        NeurIPS 2022; parameters and initial values as in the official H3 code.
    """

    settings: DiagonalSettings
    optimizer_groups: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("log_dt", "log_decay", "frequency", "b"), "ssm"
    )

    def __init__(self, d_model: int, **settings: Any) -> None:
        its = self.settings
        copies, modes, outputs = its.transitions(d_model), its.d_state // 2, its.n_outputs * d_model
        super().__init__(d_model, outputs, **settings)
        self.log_dt = nn.Parameter(uniform_log_dt(its.dt_min, its.dt_max, d_model))
        self.log_decay = nn.Parameter(torch.full((copies, modes), _DECAYS[its.real_transform][1]))
        frequency = diagonal_frequencies(its.init, modes)
        self.frequency = nn.Parameter(torch.empty(copies, modes).copy_(frequency))
        self.b = nn.Parameter(torch.tensor([1.0, 0.0]).repeat(copies, modes, 1))
        self.c = nn.Parameter(torch.randn(outputs, modes, 2) * 0.5**0.5)
        self.skip = nn.Parameter(torch.randn(outputs))

    @prepared
    def weights(self) -> DiagonalWeights:
        """Logarithm of the transition, input vector and output vector of the recurrence."""
        decay = _DECAYS[self.settings.real_transform][0](self.log_decay)
        inputs = (self.log_dt, decay, self.frequency, self.b)
        return DiagonalWeights(*discretize(*inputs, self.settings.discretization), self.c)
