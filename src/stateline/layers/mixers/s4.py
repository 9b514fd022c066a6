"""S4: a state space model per channel whose transition is diagonal plus low rank."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from stateline.layers.decoder import prepared
from stateline.layers.mixers.diagonal_ssm import ChannelSSM, Operators
from stateline.layers.mixers.ssm_layer import SSMLayer
from stateline.layers.mixers.ssm_settings import ChannelSSMSettings, Output
from stateline.layers.mixers.step_sizes import uniform_log_dt
from stateline.ops import DPLRWeights, dplr_ssm, dplr_ssm_every, dplr_ssm_step
from stateline.ops.fft_conv import convolution_flops
from stateline.ops.hippo import diagonal_plus_low_rank


class S4SSM(ChannelSSM):
    r"""A state space model for each channel that starts as HiPPO-LegS itself.

    .. math:: \dot x = (\Lambda - P P^*) x + B u, \qquad y = 2\,\mathrm{Re}(C x) + D u

    discretised by the bilinear rule with a step for each channel. HiPPO's matrix is not normal, so
    no numerically stable change of basis makes it diagonal; with the low-rank term P one does.
    Modes come in conjugate pairs; one of each pair is stored.

    All parameters and the state stay float32 under a cast to half precision.

    Args:
        d_model: Number of channels.
        **settings: See :class:`~stateline.layers.mixers.ssm_settings.ChannelSSMSettings`; a
            transition is Lambda, P and B.

    Raises:
        InputError: If ``d_state`` is not a positive even number, ``n_ssm`` does not divide
            ``d_model``, ``n_outputs`` is not positive, or the steps are not
            ``0 < dt_min <= dt_max``.

    References:
        Gu et al., "Efficiently Modeling Long Sequences with Structured State Spaces", ICLR 2022;
        Goel et al., "It's Raw!", ICML 2022, for the sign of the low-rank term. Initial values as
        in the official code, but for B: there its entries are bounded by 2, so that the state is
        not HiPPO's.
    """

    # Differs from the official code, which stores C (I - A^L) for the longest L seen, to avoid
    # computing A^L in the generating function of the kernel. Here plain C is stored and the kernel
    # is made of powers of A (see stateline.ops.dplr_ssm), so the weights do not change when a
    # longer sequence comes, and steps use the same C as the convolution.
    optimizer_groups: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("log_dt", "log_decay", "frequency", "p", "b"), "ssm"
    )
    operators = Operators(dplr_ssm, dplr_ssm_every, dplr_ssm_step)

    settings: ChannelSSMSettings

    def __init__(self, d_model: int, **settings: Any) -> None:
        its = self.settings
        copies, modes, outputs = its.transitions(d_model), its.d_state // 2, its.n_outputs * d_model
        super().__init__(d_model, outputs, **settings)
        values, low_rank, b = diagonal_plus_low_rank("legs", its.d_state)
        self.log_dt = nn.Parameter(uniform_log_dt(its.dt_min, its.dt_max, d_model))
        self.log_decay = nn.Parameter(torch.empty(copies, modes).copy_((-values[:, 0]).log()))
        self.frequency = nn.Parameter(torch.empty(copies, modes).copy_(values[:, 1]))
        self.p = nn.Parameter(torch.empty(copies, modes, 2).copy_(low_rank[0]))
        self.b = nn.Parameter(torch.empty(copies, modes, 2).copy_(b))
        self.c = nn.Parameter(torch.randn(outputs, modes, 2) * 0.5**0.5)
        self.skip = nn.Parameter(torch.randn(outputs))

    @prepared
    def weights(self) -> DPLRWeights:
        """Step, diagonal and low-rank part of the transition, input and output vector."""
        a = torch.stack([-self.log_decay.exp(), self.frequency], dim=-1)
        copies = self.d_model // len(a)
        a, p, b = (t.repeat(copies, 1, 1) for t in (a, self.p, self.b))
        return DPLRWeights(self.log_dt.exp(), a, p, b, self.c)

    def flops_of_every(self, stride: int, length: int) -> float:
        """Each input for all modes; per stride, the products of the scan and the outputs."""
        size, doublings = 2.0 * self.c.shape[1], max(length // stride - 1, 0).bit_length()
        scan = size * doublings / stride
        return 2 * size * (self.d_model * (1 + scan) + len(self.c) / stride)

    def flops_per_token(self, length: int) -> float:
        """The convolution of each output, and its kernel.

        The kernel is a product of two orbits: powers of the transition times the input vector, and
        far powers times the output vectors. Doubling finds them with one squaring each.
        """
        size, doublings = 2 * self.c.shape[1], (length - 1).bit_length()
        near = 1 << (doublings + 1) // 2
        far = 1 << doublings // 2
        squarings = self.d_model * size**3 * doublings
        orbits = size**2 * (self.d_model * (near - 1) + len(self.c) * (far - 1))
        product = size * len(self.c) * near * far
        kernel = 2.0 * (squarings + orbits + product)
        return kernel / length + len(self.c) * convolution_flops(length)


class S4(SSMLayer):
    r"""Structured state space layer, whose transition is diagonal plus low rank.

    .. math:: y = \mathrm{glu}(W\,\mathrm{gelu}(\mathrm{SSM}(x)) + b)

    Its state starts as an optimal summary of the whole past by Legendre polynomials (HiPPO-LegS).
    S4D drops the low-rank term and is faster in training and decoding; its state has the same,
    constant size.

    Args:
        d_model: Number of channels.
        output: The map across channels: ``glu``, ``half_glu`` or ``linear``.
        **settings: See :class:`~stateline.layers.mixers.ssm_settings.ChannelSSMSettings`.

    Raises:
        InputError: If ``output`` is unknown, or a setting does not fit.

    References:
        Gu et al., "Efficiently Modeling Long Sequences with Structured State Spaces", ICLR 2022.
    """

    settings: ChannelSSMSettings

    def __init__(self, d_model: int, *, output: Output = "glu", **settings: Any) -> None:
        super().__init__(S4SSM.with_settings(self.settings, d_model, **settings), output)
