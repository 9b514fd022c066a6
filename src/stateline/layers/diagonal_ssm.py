"""Diagonal state space model per channel: the part that S4D and H3 share."""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stateline.errors import InputError, unknown_name
from stateline.layers.base import SequenceLayer, zeros
from stateline.layers.derived import derived
from stateline.ops import diagonal_ssm, diagonal_ssm_chunk, diagonal_ssm_step
from stateline.ops.hippo import Init, diagonal_frequencies
from stateline.ops.planes import divide, exponential, multiply

Discretization = Literal["zoh", "bilinear"]


class DiagonalSSMState(NamedTuple):
    """Modes of every channel."""

    h: Float[Tensor, "*batch channel mode 2"]

    @staticmethod
    def accumulators() -> tuple[str, ...]:
        """The modes, since their rounding accumulates."""
        return ("h",)


class DiagonalSSM(SequenceLayer[DiagonalSSMState]):
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
        init: Frequencies Im A, with Re A = -1/2: ``lin`` (:math:`\pi n`), ``inv``, ``legs``.
        discretization: ``zoh`` or ``bilinear``.
        dt_min: Smallest initial step.
        dt_max: Largest initial step; steps are drawn log-uniformly.

    Raises:
        InputError: If ``d_state`` is not a positive even number, the steps are not
            ``0 < dt_min <= dt_max``, or a name is unknown.

    References:
        Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models",
        NeurIPS 2022; parameters and initial values as in the official H3 code.
    """

    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = {
        "log_dt": "ssm",
        "log_decay": "ssm",
        "frequency": "ssm",
        "b": "ssm",
    }

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        init: Init = "lin",
        discretization: Discretization = "bilinear",
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
    ) -> None:
        super().__init__(d_model)
        if d_state < 2 or d_state % 2:
            raise InputError(f"d_state must be a positive even number, got {d_state=}")
        if not 0 < dt_min <= dt_max:
            raise InputError(f"steps must have 0 < dt_min <= dt_max, got {dt_min=} and {dt_max=}")
        if discretization not in get_args(Discretization):
            raise unknown_name("discretization", discretization, get_args(Discretization))
        self.discretization = discretization
        modes = d_state // 2
        self.log_dt = nn.Parameter(
            torch.empty(d_model).uniform_(math.log(dt_min), math.log(dt_max))
        )
        self.log_decay = nn.Parameter(torch.full((d_model, modes), math.log(0.5)))
        self.frequency = nn.Parameter(torch.empty(d_model, modes))
        with torch.no_grad():
            self.frequency.copy_(diagonal_frequencies(init, modes))
        self.b = nn.Parameter(torch.tensor([1.0, 0.0]).repeat(d_model, modes, 1))
        self.c = nn.Parameter(torch.randn(d_model, modes, 2) * 0.5**0.5)
        self.skip = nn.Parameter(torch.randn(d_model))

    def init_state(self, batch_size: int, *, capacity: int = 0) -> DiagonalSSMState:  # noqa: ARG002
        """Zero state."""
        return DiagonalSSMState(zeros(self.c, batch_size, *self.c.shape))

    def forward(
        self, x: Float[Tensor, "*batch length d_model"]
    ) -> Float[Tensor, "*batch length d_model"]:
        """Convolve with the impulse response."""
        return diagonal_ssm(x, *self.discretize()) + self._skipped(x)

    def forward_chunk(
        self, x: Float[Tensor, "*batch length d_model"], state: DiagonalSSMState
    ) -> tuple[Float[Tensor, "*batch length d_model"], DiagonalSSMState]:
        """Convolve the chunk, and add what the state before it still contributes."""
        y, h = diagonal_ssm_chunk(x, *self.discretize(), state.h)
        return y + self._skipped(x), DiagonalSSMState(h)

    def step(
        self, x: Float[Tensor, "*batch d_model"], state: DiagonalSSMState
    ) -> tuple[Float[Tensor, "*batch d_model"], DiagonalSSMState]:
        """Advance the recurrence by one input."""
        y, h = diagonal_ssm_step(x, *self.discretize(), state.h)
        return y + self._skipped(x), DiagonalSSMState(h)

    def flops_per_token(self, length: int) -> float:
        """Two real FFTs of twice the length per channel, the product, and the kernel's share."""
        fft = 2.5 * 2 * length * math.log2(2 * length)
        kernel = 4.0 * self.frequency.shape[1] * length
        return self.d_model * (2 * fft + 6 * length + kernel) / length

    @derived
    def discretize(
        self,
    ) -> tuple[
        Float[Tensor, "d_model mode 2"],
        Float[Tensor, "d_model mode 2"],
        Float[Tensor, "d_model mode 2"],
    ]:
        """Logarithm of the transition, input vector and output vector of the recurrence."""
        dt = self.log_dt.exp()[:, None, None]
        a = torch.stack([-self.log_decay.exp(), self.frequency], dim=-1)
        z = dt * a
        real, imag = z.unbind(dim=-1)
        if self.discretization == "zoh":
            gain = exponential(z) - torch.tensor([1.0, 0.0], device=z.device)
            return z, divide(multiply(gain, self.b), a), self.c
        # log((1 + z/2) / (1 - z/2)) without cancellation for small z, and without branch cuts
        denominator = (1 - real / 2).square() + imag.square() / 4
        log_magnitude = 0.5 * torch.log1p(2 * real / denominator)
        angle = torch.atan2(imag, 1 - (real.square() + imag.square()) / 4)
        shifted = torch.stack([1 - real / 2, -imag / 2], dim=-1)
        return torch.stack([log_magnitude, angle], dim=-1), dt * divide(self.b, shifted), self.c

    def _skipped(self, x: Tensor) -> Tensor:
        return (self.skip * x).to(x.dtype)
