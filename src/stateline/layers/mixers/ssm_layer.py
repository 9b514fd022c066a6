"""State space layers: a state space model per channel, then a map across channels."""

import torch.nn.functional as F
from torch import Tensor

from stateline.errors import InputError
from stateline.layers.base import AnyLayer
from stateline.layers.compose import Around
from stateline.layers.linear import Linear
from stateline.layers.mixers.ssm_settings import Output


class SSMLayer(Around):
    r"""A state space model per channel, a nonlinearity, and a map across channels.

    With :math:`z = \mathrm{gelu}(\mathrm{SSM}(x))`, the output is :math:`W z + b` (``linear``),
    :math:`(W_1 z + b_1) \odot \sigma(W_2 z + b_2)` (``glu``) or :math:`z \odot \sigma(W z + b)`
    (``half_glu``).

    Subclasses choose the state space model; its state is the state of the layer.

    Args:
        ssm: Sequence layer that mixes along the sequence; its output may be wider than its input.
        output: ``linear``, ``glu`` or ``half_glu``.

    Raises:
        InputError: If ``output`` is unknown, or is ``half_glu`` where the widths differ.
    """

    def __init__(self, ssm: AnyLayer, output: Output) -> None:
        super().__init__(ssm.d_model)
        if output == "half_glu" and ssm.d_output != ssm.d_model:
            raise InputError(
                "output='half_glu' multiplies each channel by its own signal, so there must be one "
                f"signal per channel: got {ssm.d_output} signals and d_model={ssm.d_model}; take "
                "'glu'"
            )
        self.ssm, self.output = ssm, output
        self.out_proj = Linear(ssm.d_output, ssm.d_model * (2 if output == "glu" else 1))

    @property
    def inner(self) -> AnyLayer:
        """The state space model."""
        return self.ssm

    def leave(self, kept: Tensor, y: Tensor) -> Tensor:  # noqa: ARG002
        """The nonlinearity and the map across channels."""
        z = F.gelu(y)
        mixed: Tensor = self.out_proj(z)
        if self.output == "glu":
            return F.glu(mixed)
        return z * mixed.sigmoid() if self.output == "half_glu" else mixed
