"""S4D: a diagonal state space model per channel, then a map across channels."""

from stateline.layers.diagonal_ssm import DiagonalSSM, RealTransform
from stateline.layers.ssm_layer import Output, SSMLayer
from stateline.ops.discretization import Discretization
from stateline.ops.hippo import Init


class S4D(SSMLayer):
    r"""Diagonal state space layer: :math:`y = W\,\mathrm{gelu}(\mathrm{SSM}(x)) + b`.

    Linear in time with fixed coefficients: it remembers well, but cannot choose what to remember by
    what it reads. The state has a constant size.

    Args:
        d_model: Number of channels.
        d_state: Real size of each channel's state.
        n_ssm: Number of different A and B among the channels; by default one each.
        n_outputs: Signals read from the state of each channel, before the map.
        init: ``lin``, ``inv`` or ``legs``: see :class:`DiagonalSSM`.
        discretization: ``zoh`` or ``bilinear``.
        real_transform: How Re A comes from its parameter: see :class:`DiagonalSSM`.
        dt_min: Smallest initial step.
        dt_max: Largest initial step.
        output: The map across channels: ``linear``, or ``glu`` as in the S4 papers.

    References:
        Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models",
        NeurIPS 2022. As a mixer beside a feed-forward: the S4D baseline of Fu et al., 2023.
    """

    # Differs from that baseline's code, which shares one A among all channels and folds B into C:
    # both are per channel here, unless n_ssm says otherwise.
    def __init__(  # noqa: PLR0913
        self,
        d_model: int,
        *,
        d_state: int = 64,
        n_ssm: int | None = None,
        n_outputs: int = 1,
        init: Init = "lin",
        discretization: Discretization = "zoh",
        real_transform: RealTransform = "exp",
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        output: Output = "linear",
    ) -> None:
        ssm = DiagonalSSM(
            d_model,
            d_state=d_state,
            n_ssm=n_ssm,
            n_outputs=n_outputs,
            init=init,
            discretization=discretization,
            real_transform=real_transform,
            dt_min=dt_min,
            dt_max=dt_max,
        )
        super().__init__(ssm, n_outputs * d_model, output)
