"""Diagonal state space models per channel: the part that S4D, H3 and others share."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stateline.errors import InputError, unknown_name
from stateline.layers.base import SequenceLayer, zeros
from stateline.layers.derived import derived
from stateline.ops import (
    diagonal_ssm,
    diagonal_ssm_chunk,
    diagonal_ssm_every,
    diagonal_ssm_step,
)
from stateline.ops.discretization import DISCRETIZATIONS, Discretization
from stateline.ops.hippo import Init, diagonal_frequencies
from stateline.ops.planes import multiply

RealTransform = Literal["exp", "none", "relu", "sigmoid", "softplus"]

_LEAST = 1e-4
_DECAYS: Mapping[RealTransform, tuple[Callable[[Tensor], Tensor], float]] = {
    "exp": (torch.exp, math.log(0.5)),
    "none": (lambda p: p, 0.5),
    "relu": (lambda p: F.relu(p) + _LEAST, 0.5 - _LEAST),
    "sigmoid": (torch.sigmoid, 0.0),
    "softplus": (F.softplus, math.log(math.expm1(0.5))),
}
"""How a parameter becomes the decay -Re A, and the parameter of a decay of one half."""


class DiagonalSSMState(NamedTuple):
    """Modes of every channel."""

    h: Float[Tensor, "*batch channel mode 2"]

    @staticmethod
    def accumulators() -> tuple[str, ...]:
        """The modes, since their rounding accumulates."""
        return ("h",)


class DiagonalRecurrence(SequenceLayer[DiagonalSSMState]):
    """A diagonal linear recurrence for each channel, with a skip connection.

    Abstract: it does not say from which parameters its coefficients come. Inputs may have any
    number of batch axes. All parameters and the state stay float32 under a cast to half precision.

    Attributes:
        c: Output vectors, of ``n_outputs`` readouts of every channel; a subclass defines them.
        skip: What each output takes of its channel's input as it is; a subclass defines it.
    """

    keeps_float32 = True
    c: Float[Tensor, "output mode 2"]
    skip: Float[Tensor, " output"]

    @abstractmethod
    def discretize(
        self,
    ) -> tuple[
        Float[Tensor, "#d_model mode 2"],
        Float[Tensor, "d_model mode 2"],
        Float[Tensor, "output mode 2"],
    ]:
        """Logarithm of the transition, input vector and output vector of the recurrence."""

    def init_state(self, batch_size: int, *, capacity: int = 0) -> DiagonalSSMState:  # noqa: ARG002
        """Zero state."""
        return DiagonalSSMState(zeros(self.c, batch_size, self.d_model, *self.c.shape[1:]))

    def forward(
        self, x: Float[Tensor, "*batch length d_model"]
    ) -> Float[Tensor, "*batch length output"]:
        """Convolve with the impulse response."""
        return diagonal_ssm(x, *self.discretize()) + skipped(x, self.skip)

    def every(
        self, x: Float[Tensor, "*batch length d_model"], stride: int
    ) -> Float[Tensor, "*batch taken output"]:
        """What ``forward`` gives at the last token of every ``stride`` tokens, at less cost."""
        y = diagonal_ssm_every(x, *self.discretize(), stride)
        return y + skipped(x[..., stride - 1 :: stride, :], self.skip)

    def forward_chunk(
        self, x: Float[Tensor, "*batch length d_model"], state: DiagonalSSMState
    ) -> tuple[Float[Tensor, "*batch length output"], DiagonalSSMState]:
        """Convolve the chunk, and add what the state before it still contributes."""
        y, h = diagonal_ssm_chunk(x, *self.discretize(), state.h)
        return y + skipped(x, self.skip), DiagonalSSMState(h)

    def step(
        self, x: Float[Tensor, "*batch d_model"], state: DiagonalSSMState
    ) -> tuple[Float[Tensor, "*batch output"], DiagonalSSMState]:
        """Advance the recurrence by one input."""
        y, h = diagonal_ssm_step(x, *self.discretize(), state.h)
        return y + skipped(x, self.skip), DiagonalSSMState(h)

    def flops_of_every(self, stride: int) -> float:
        """Of ``every``, per token: each input for all modes, and the share of each output."""
        return 4.0 * self.c.shape[1] * (self.d_model + len(self.c) / stride)

    def flops_per_token(self, length: int) -> float:
        """The convolution of each output, and the kernel's share."""
        return len(self.c) * (convolution_flops(length) + 4.0 * self.c.shape[1])


def skipped(
    x: Float[Tensor, "*batch d_model"], skip: Float[Tensor, " output"]
) -> Float[Tensor, "*batch output"]:
    """Each channel's input as it is, times a weight per output; channels repeat."""
    return (skip.unflatten(0, (-1, x.shape[-1])) * x[..., None, :]).flatten(-2).to(x.dtype)


def convolution_flops(length: int) -> float:
    """Per token and channel: two real FFTs of twice the length, and the product."""
    return 2 * 2.5 * 2 * math.log2(2 * length) + 6


def uniform_log_dt(dt_min: float, dt_max: float, *shape: int) -> Float[Tensor, "*shape"]:
    """Logarithms of steps, drawn uniformly between those of the limits.

    Raises:
        InputError: If the limits are not ``0 < dt_min <= dt_max``.
    """
    if not 0 < dt_min <= dt_max:
        raise InputError(f"steps must have 0 < dt_min <= dt_max, got {dt_min=} and {dt_max=}")
    return torch.empty(shape).uniform_(math.log(dt_min), math.log(dt_max))


class DiagonalSSM(DiagonalRecurrence):
    r"""A diagonal state space model for each channel, with a skip connection.

    .. math:: \dot x = A x + B u, \qquad y = 2\,\mathrm{Re}(C x) + D u

    is discretised with the step dt of each channel. By zero-order hold (``zoh``),
    :math:`\bar A = e^{z}`, :math:`\bar B = (e^{z} - 1) B / A` with :math:`z = \mathrm{dt}\, A`; by
    the bilinear rule, :math:`\bar A = (1 + z/2) / (1 - z/2)` and
    :math:`\bar B = \mathrm{dt}\, B / (1 - z/2)`. Training convolves with the kernel
    :math:`2\,\mathrm{Re} \sum_n C_n {\bar B}_n {\bar A}_n^t`.

    All parameters and the state stay float32 under a cast to half precision. Inputs may have any
    number of batch axes.

    Args:
        d_model: Number of channels.
        d_state: Real size of each channel's state: ``d_state / 2`` complex modes.
        n_ssm: Number of different A and B; channel h has number ``h % n_ssm``. By default one each.
        n_outputs: Signals read from the state of each channel, each by a C and a D of its own. The
            output is as many times as wide; it holds all first signals, then all second ones.
        init: Frequencies Im A, with Re A = -1/2: ``lin`` (:math:`\pi n`), ``inv``, ``legs``.
        discretization: ``zoh`` or ``bilinear``.
        real_transform: How Re A comes from its parameter p (``log_decay``): ``exp`` is
            :math:`-e^p`; ``relu``, with a floor of 1e-4, ``sigmoid`` and ``softplus`` likewise;
            ``none`` is -p, which nothing keeps stable.
        dt_min: Smallest initial step.
        dt_max: Largest initial step; steps are drawn log-uniformly.

    Raises:
        InputError: If ``d_state`` is not a positive even number, ``n_ssm`` does not divide
            ``d_model``, ``n_outputs`` is not positive, the steps are not ``0 < dt_min <= dt_max``,
            or a name is unknown.

    References:
        Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models",
        NeurIPS 2022; parameters and initial values as in the official H3 code.
    """

    optimizer_groups: ClassVar[Mapping[str, str]] = {
        "log_dt": "ssm",
        "log_decay": "ssm",
        "frequency": "ssm",
        "b": "ssm",
    }

    def __init__(  # noqa: PLR0913
        self,
        d_model: int,
        *,
        d_state: int = 64,
        n_ssm: int | None = None,
        n_outputs: int = 1,
        init: Init = "lin",
        discretization: Discretization = "bilinear",
        real_transform: RealTransform = "exp",
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
    ) -> None:
        super().__init__(d_model)
        modes, copies = check_sizes(d_model, d_state, n_ssm, n_outputs)
        if discretization not in DISCRETIZATIONS:
            raise unknown_name("discretization", discretization, DISCRETIZATIONS)
        if real_transform not in _DECAYS:
            raise unknown_name("real_transform", real_transform, _DECAYS)
        self.discretization, self.real_transform = discretization, real_transform
        self.log_dt = nn.Parameter(uniform_log_dt(dt_min, dt_max, d_model))
        self.log_decay = nn.Parameter(torch.full((copies, modes), _DECAYS[real_transform][1]))
        self.frequency = nn.Parameter(torch.empty(copies, modes))
        with torch.no_grad():
            self.frequency.copy_(diagonal_frequencies(init, modes))
        self.b = nn.Parameter(torch.tensor([1.0, 0.0]).repeat(copies, modes, 1))
        self.c = nn.Parameter(torch.randn(n_outputs * d_model, modes, 2) * 0.5**0.5)
        self.skip = nn.Parameter(torch.randn(n_outputs * d_model))

    @derived
    def discretize(
        self,
    ) -> tuple[
        Float[Tensor, "d_model mode 2"],
        Float[Tensor, "d_model mode 2"],
        Float[Tensor, "output mode 2"],
    ]:
        """Logarithm of the transition, input vector and output vector of the recurrence."""
        dt = self.log_dt.exp()[:, None, None]
        decay = _DECAYS[self.real_transform][0](self.log_decay)
        copies = self.d_model // len(decay)
        a = torch.stack([-decay, self.frequency], dim=-1).repeat(copies, 1, 1)
        log_a, gain = DISCRETIZATIONS[self.discretization](dt * a)
        return log_a, dt * multiply(gain, self.b.repeat(copies, 1, 1)), self.c


def check_sizes(d_model: int, d_state: int, n_ssm: int | None, n_outputs: int) -> tuple[int, int]:
    """Modes of each channel, and how many different transitions there are."""
    if d_state < 2 or d_state % 2:
        raise InputError(f"d_state must be a positive even number, got {d_state=}")
    if n_outputs < 1:
        raise InputError(f"n_outputs must be at least 1, got {n_outputs=}")
    copies = d_model if n_ssm is None else n_ssm
    if copies < 1 or d_model % copies:
        raise InputError(f"n_ssm must divide d_model, got {n_ssm=} and {d_model=}")
    return d_state // 2, copies
