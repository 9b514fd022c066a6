"""S5: one state space model of many inputs and outputs for all channels."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.layers.base import SequenceLayer, accumulates, zeros
from stateline.layers.decoder import prepared
from stateline.layers.mixers.ssm_layer import SSMLayer
from stateline.layers.mixers.ssm_settings import Output, S5Settings
from stateline.layers.mixers.step_sizes import uniform_log_dt
from stateline.ops import MIMOWeights, mimo_ssm, mimo_ssm_step
from stateline.ops.convolution import skipped
from stateline.ops.discretization import DISCRETIZATIONS
from stateline.ops.hippo import normal_form
from stateline.ops.planes import conjugate, multiply
from stateline.ops.scan import scan_flops
from stateline.settings import Count


@accumulates("h")
class S5State(NamedTuple):
    """Modes that all channels share."""

    h: Float[Tensor, "batch mode 2"]


class S5SSM(SequenceLayer[S5State]):
    r"""A diagonal state space model with as many inputs and outputs as there are channels.

    .. math:: \dot x = \Lambda x + B u, \qquad y = 2\,\mathrm{Re}(C x) + D \odot u

    with one complex state for all channels, discretised with a step for each of its modes. Lambda
    begins as the spectrum of the normal part of HiPPO-LegS, in ``n_blocks`` blocks; B and C begin
    as random matrices in the basis of HiPPO.

    All parameters and the state stay float32 under a cast to half precision.

    Args:
        d_model: Number of channels.
        n_outputs: Signals read from the state for each channel, each by its own C and D. The output
            holds the first signals of all channels, then the second ones, and so on.
        **settings: See :class:`~stateline.layers.mixers.ssm_settings.S5Settings`. Without
            ``conj_sym``, y is :math:`\mathrm{Re}(C x) + D \odot u`.

    Raises:
        InputError: If the blocks do not fit, ``n_outputs`` is not positive, the steps are not
            ``0 < dt_min <= dt_max``, or the discretisation is unknown.

    References:
        Smith et al., "Simplified State Space Layers for Sequence Modeling", ICLR 2023.
    """

    settings: S5Settings
    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("log_dt", "real", "frequency", "b"), "ssm"
    )

    def __init__(self, d_model: int, *, n_outputs: Count = 1, **settings: Any) -> None:
        super().__init__(d_model, n_outputs * d_model, **settings)
        its, self.n_outputs = self.settings, n_outputs
        # Differs from the official code, which by default lets Re Lambda become positive, so that
        # the state explodes: clip_eigs=False does the same.
        size = its.d_state // its.n_blocks
        values, vectors = normal_form("legs", size)  # half of them; the others are conjugates
        if not its.conj_sym:
            values = torch.cat([values, conjugate(values)])
            vectors = torch.cat([vectors, conjugate(vectors)], dim=1)
        modes = its.n_blocks * len(values)
        self.log_dt = nn.Parameter(uniform_log_dt(its.dt_min, its.dt_max, modes))
        real, frequency = values.repeat(its.n_blocks, 1).unbind(dim=-1)
        self.real = nn.Parameter(torch.empty(modes).copy_(real))
        self.frequency = nn.Parameter(torch.empty(modes).copy_(frequency))
        self.b = nn.Parameter(torch.empty(modes, d_model, 2))
        c = torch.randn(n_outputs * d_model, its.n_blocks, size, 1, 2) / its.d_state**0.5
        self.c = nn.Parameter(multiply(c, vectors.to(c)).sum(dim=2).flatten(1, 2))
        self.skip = nn.Parameter(torch.randn(n_outputs * d_model))
        b = torch.randn(its.n_blocks, size, d_model) / its.d_state**0.5
        with torch.no_grad():
            self.b.copy_(torch.einsum("nmz,jnh->jmhz", conjugate(vectors).to(b), b).flatten(0, 1))

    def init_state(self, batch_size: int, *, capacity: int = 0) -> S5State:  # noqa: ARG002
        """Zero state."""
        return S5State(zeros(self.c, batch_size, *self.c.shape[1:]))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return mimo_ssm(x, self.weights())[0] + skipped(x, self.skip)

    @override
    def forward_chunk(self, x: Tensor, state: S5State) -> tuple[Tensor, S5State]:
        y, h = mimo_ssm(x, self.weights(), state.h.to(self.c.dtype))
        return y + skipped(x, self.skip), S5State(h)

    @override
    def step(self, x: Tensor, state: S5State) -> tuple[Tensor, S5State]:
        y, h = mimo_ssm_step(x, self.weights(), state.h.to(self.c.dtype))
        return y + skipped(x, self.skip), S5State(h)

    def flops_per_token(self, length: int) -> float:
        """Both maps, and the scan in blocks, whose ends are scanned again."""
        maps = 4.0 * (self.d_model + len(self.c))
        return len(self.real) * (maps + scan_flops(length) / length)

    @prepared
    def weights(self) -> MIMOWeights:
        """Logarithm of the transition, input matrix and output matrix of the recurrence."""
        its = self.settings
        real = self.real.clamp(max=-1e-4) if its.clip_eigs else self.real
        a = torch.stack([real, self.frequency], dim=-1)
        log_a, gain = DISCRETIZATIONS[its.discretization](self.log_dt.exp()[:, None] * a)
        b = multiply((self.log_dt.exp()[:, None] * gain)[:, None], self.b)
        # Halved without conjugate symmetry, because the op counts each mode twice.
        return MIMOWeights(log_a, b, self.c if its.conj_sym else self.c / 2)


class S5(SSMLayer):
    r"""State space layer with one state for all channels, and a gate after it.

    .. math:: y = z \odot \sigma(W z + b), \qquad z = \mathrm{gelu}(\mathrm{SSM}(x))

    Where S4 and S4D have a state per channel and mix the channels afterwards only, S5 mixes them on
    their way into the state and out of it. The state has a constant size.

    Args:
        d_model: Number of channels.
        output: The map across channels: ``half_glu``, ``glu`` or ``linear``.
        **settings: See :class:`~stateline.layers.mixers.ssm_settings.S5Settings`.

    Raises:
        InputError: If ``output`` is unknown, or a setting does not fit.

    References:
        Smith et al., "Simplified State Space Layers for Sequence Modeling", ICLR 2023.
    """

    settings: S5Settings

    def __init__(self, d_model: int, *, output: Output = "half_glu", **settings: Any) -> None:
        super().__init__(S5SSM.with_settings(self.settings, d_model, **settings), output)
