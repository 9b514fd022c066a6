"""S4D: a diagonal state space model per channel, then a map across channels."""

from typing import Any

import torch

from stateline.layers.mixers.diagonal_ssm import DiagonalSSM
from stateline.layers.mixers.ssm_layer import SSMLayer
from stateline.layers.mixers.ssm_settings import Output, S4DSettings
from stateline.ops.hippo import diagonal_plus_low_rank


class S4D(SSMLayer):
    r"""Diagonal state space layer: :math:`y = W\,\mathrm{gelu}(\mathrm{SSM}(x)) + b`.

    SSM is :class:`~stateline.layers.DiagonalSSM`. Its coefficients do not depend on the input: it
    remembers well, but cannot select by content what to remember. The state has a constant size.

    Args:
        d_model: Number of channels.
        output: The map across channels: ``linear``, ``half_glu``, or ``glu`` as in the S4 papers.
        **settings: See :class:`~stateline.layers.mixers.ssm_settings.DiagonalSettings`; the
            discretization is ``zoh`` by default.

    Raises:
        InputError: If ``output`` is unknown, or a setting does not fit.

    References:
        Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models",
        NeurIPS 2022. As a mixer beside a feed-forward: the S4D baseline of Fu et al., 2023.
    """

    settings: S4DSettings

    # Differs from that baseline's code, which shares one A among all channels and folds B into C:
    # both are per channel here, unless n_ssm says otherwise.
    def __init__(self, d_model: int, *, output: Output = "linear", **settings: Any) -> None:
        ssm = DiagonalSSM.with_settings(self.settings, d_model, **settings)
        if self.settings.init == "legs":
            # As in state-spaces/s4: B in the basis of the modes, where the official code bounds it
            # by 2. H3's code, which DiagonalSSM follows, starts with B = 1.
            _, _, b = diagonal_plus_low_rank("legs", self.settings.d_state)
            with torch.no_grad():
                ssm.b.copy_(b.clamp(-2, 2))
        super().__init__(ssm, output)
