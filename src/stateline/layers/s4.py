"""S4: a state space model per channel whose transition is diagonal plus low rank."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stateline.layers.base import SequenceLayer, zeros
from stateline.layers.derived import derived
from stateline.layers.diagonal_ssm import (
    DiagonalSSMState,
    check_sizes,
    convolution_flops,
    skipped,
    uniform_log_dt,
)
from stateline.layers.ssm_layer import Output, SSMLayer
from stateline.ops import dplr_ssm, dplr_ssm_chunk, dplr_ssm_every, dplr_ssm_step
from stateline.ops.hippo import diagonal_plus_low_rank


class S4SSM(SequenceLayer[DiagonalSSMState]):
    r"""A state space model for each channel that begins as HiPPO-LegS itself.

    .. math:: \dot x = (\Lambda - P P^*) x + B u, \qquad y = 2\,\mathrm{Re}(C x) + D u

    discretised by the bilinear rule with a step for each channel. HiPPO's matrix is not normal, so
    that it cannot be made diagonal safely; with the low-rank term P it can. Of the modes, half is
    kept, since the other half is its conjugate.

    All parameters and the state stay float32 under a cast to half precision.

    Args:
        d_model: Number of channels.
        d_state: Real size of each channel's state: ``d_state / 2`` complex modes.
        n_ssm: Number of different Lambda, P and B; channel h has number ``h % n_ssm``. By default
            one each.
        n_outputs: Signals read from the state of each channel, each by a C and a D of its own.
        dt_min: Smallest initial step.
        dt_max: Largest initial step; steps are drawn log-uniformly.

    Raises:
        InputError: If ``d_state`` is not a positive even number, ``n_ssm`` does not divide
            ``d_model``, ``n_outputs`` is not positive, or the steps are not
            ``0 < dt_min <= dt_max``.

    References:
        Gu et al., "Efficiently Modeling Long Sequences with Structured State Spaces", ICLR 2022;
        Goel et al., "It's Raw!", ICML 2022, for the sign of the low-rank term.
    """

    # Differs from the official code, which stores C (I - A^L) for the longest L that it has seen,
    # to save computing A^L for the generating function of the kernel: plain C is stored, and the
    # kernel is made of powers of A (see stateline.ops.dplr_ssm). So the weights do not change when
    # a longer sequence comes, and steps use the same C as the convolution.
    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("log_dt", "log_decay", "frequency", "p", "b"), "ssm"
    )

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        n_ssm: int | None = None,
        n_outputs: int = 1,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
    ) -> None:
        super().__init__(d_model)
        modes, copies = check_sizes(d_model, d_state, n_ssm, n_outputs)
        values, low_rank, b = diagonal_plus_low_rank("legs", d_state)
        self.log_dt = nn.Parameter(uniform_log_dt(dt_min, dt_max, d_model))
        self.log_decay = nn.Parameter(torch.empty(copies, modes))
        self.frequency = nn.Parameter(torch.empty(copies, modes))
        self.p = nn.Parameter(torch.empty(copies, modes, 2))
        self.b = nn.Parameter(torch.empty(copies, modes, 2))
        with torch.no_grad():
            self.log_decay.copy_((-values[:, 0]).log())
            self.frequency.copy_(values[:, 1])
            self.p.copy_(low_rank[0])
            self.b.copy_(b)
        self.c = nn.Parameter(torch.randn(n_outputs * d_model, modes, 2) * 0.5**0.5)
        self.skip = nn.Parameter(torch.randn(n_outputs * d_model))

    def init_state(self, batch_size: int, *, capacity: int = 0) -> DiagonalSSMState:  # noqa: ARG002
        """Zero state."""
        return DiagonalSSMState(zeros(self.c, batch_size, self.d_model, *self.c.shape[1:]))

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length output"]:
        """Convolve with the impulse response."""
        return dplr_ssm(x, *self.continuous()) + skipped(x, self.skip)

    def every(
        self, x: Float[Tensor, "batch length d_model"], stride: int
    ) -> Float[Tensor, "batch taken output"]:
        """What ``forward`` gives at the last token of every ``stride`` tokens, at less cost."""
        y = dplr_ssm_every(x, *self.continuous(), stride)
        return y + skipped(x[:, stride - 1 :: stride], self.skip)

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: DiagonalSSMState
    ) -> tuple[Float[Tensor, "batch length output"], DiagonalSSMState]:
        """Convolve the chunk, and add what the state before it still contributes."""
        y, h = dplr_ssm_chunk(x, *self.continuous(), state.h)
        return y + skipped(x, self.skip), DiagonalSSMState(h)

    def step(
        self, x: Float[Tensor, "batch d_model"], state: DiagonalSSMState
    ) -> tuple[Float[Tensor, "batch output"], DiagonalSSMState]:
        """Advance the recurrence by one input."""
        y, h = dplr_ssm_step(x, *self.continuous(), state.h)
        return y + skipped(x, self.skip), DiagonalSSMState(h)

    def flops_of_every(self, stride: int) -> float:
        """Of ``every``, per token: each input for all modes, and the share of each output."""
        size = 2.0 * self.c.shape[1]
        return 2 * size * (self.d_model * (1 + size / stride) + len(self.c) / stride)

    def flops_per_token(self, length: int) -> float:
        """The convolution of each output, the kernel's product, and the squarings before it."""
        size, doublings = 2 * self.c.shape[1], max(length - 1, 1).bit_length()
        powers = 2.0 * self.d_model * size**3 * doublings / length
        return powers + len(self.c) * (convolution_flops(length) + 2.0 * size)

    @derived
    def continuous(
        self,
    ) -> tuple[
        Float[Tensor, " d_model"],
        Float[Tensor, "d_model mode 2"],
        Float[Tensor, "d_model mode 2"],
        Float[Tensor, "d_model mode 2"],
        Float[Tensor, "output mode 2"],
    ]:
        """Step, diagonal and low-rank part of the transition, input and output vector."""
        a = torch.stack([-self.log_decay.exp(), self.frequency], dim=-1)
        copies = self.d_model // len(a)
        a, p, b = (t.repeat(copies, 1, 1) for t in (a, self.p, self.b))
        return self.log_dt.exp(), a, p, b, self.c


class S4(SSMLayer):
    r"""Structured state space layer, whose transition is diagonal plus low rank.

    .. math:: y = \mathrm{glu}(W\,\mathrm{gelu}(\mathrm{SSM}(x)) + b)

    Its state begins as an optimal summary of the whole past, by Legendre polynomials (HiPPO-LegS).
    S4D drops the low-rank term and is faster in every verb; the state is of the same, constant
    size.

    Args:
        d_model: Number of channels.
        d_state: Real size of each channel's state.
        n_ssm: Number of different transitions among the channels; by default one each.
        n_outputs: Signals read from the state of each channel, before the map.
        dt_min: Smallest initial step.
        dt_max: Largest initial step.
        output: The map across channels: ``glu``, ``half_glu`` or ``linear``.

    References:
        Gu et al., "Efficiently Modeling Long Sequences with Structured State Spaces", ICLR 2022.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        n_ssm: int | None = None,
        n_outputs: int = 1,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        output: Output = "glu",
    ) -> None:
        ssm = S4SSM(
            d_model,
            d_state=d_state,
            n_ssm=n_ssm,
            n_outputs=n_outputs,
            dt_min=dt_min,
            dt_max=dt_max,
        )
        super().__init__(ssm, n_outputs * d_model, output)
