"""State space layers: a state space model per channel, then a map across channels."""

from typing import Any, get_args

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import AnyLayer, SequenceLayer
from stateline.layers.mixers.ssm_settings import Output, check_choice


class SSMLayer(SequenceLayer[Any]):
    r"""A state space model per channel, a nonlinearity, and a map across channels.

    With :math:`z = \mathrm{gelu}(\mathrm{SSM}(x))`, the output is :math:`W z + b` (``linear``),
    :math:`(W_1 z + b_1) \odot \sigma(W_2 z + b_2)` (``glu``) or :math:`z \odot \sigma(W z + b)`
    (``half_glu``).

    The state is that of the state space model, which subclasses choose.

    Args:
        ssm: Sequence layer that mixes along the sequence; its output may be wider than its input.
        output: ``linear``, ``glu`` or ``half_glu``.

    Raises:
        InputError: If ``output`` is unknown, or is ``half_glu`` where the widths differ.
    """

    def __init__(self, ssm: AnyLayer, output: Output) -> None:
        super().__init__(ssm.d_model)
        check_choice("output", output, get_args(Output))
        if output == "half_glu" and ssm.d_output != ssm.d_model:
            raise InputError(
                "output='half_glu' multiplies each channel by its own signal, so there must be one "
                f"signal per channel: got {ssm.d_output} signals and d_model={ssm.d_model}; take "
                "'glu'"
            )
        self.ssm, self.output = ssm, output
        self.out_proj = nn.Linear(ssm.d_output, ssm.d_model * (2 if output == "glu" else 1))

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        """Initial state of the state space model."""
        return self.ssm.init_state(batch_size, capacity=capacity)

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Mix along the sequence, then across the channels."""
        return mix_channels(self.ssm(x), self.out_proj, self.output)

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: Any
    ) -> tuple[Float[Tensor, "batch length d_model"], Any]:
        """Continue from the state: mix along the sequence, then across the channels."""
        y, state = self.ssm.forward_chunk(x, state)
        return mix_channels(y, self.out_proj, self.output), state

    def step(
        self, x: Float[Tensor, "batch d_model"], state: Any
    ) -> tuple[Float[Tensor, "batch d_model"], Any]:
        """Advance the recurrence by one token, then mix the channels."""
        y, state = self.ssm.step(x, state)
        return mix_channels(y, self.out_proj, self.output), state

    def step_(
        self, x: Float[Tensor, "batch d_model"], state: Any
    ) -> Float[Tensor, "batch d_model"]:
        """Advance the recurrence in place by one token, then mix the channels."""
        return mix_channels(self.ssm.step_(x, state), self.out_proj, self.output)

    def flops_per_token(self, length: int) -> float:
        """Operations of the state space model and of the map."""
        return super().flops_per_token(length) + self.ssm.flops_per_token(length)


def mix_channels(
    y: Float[Tensor, "*batch width"], out_proj: nn.Linear, output: Output
) -> Float[Tensor, "*batch d_model"]:
    """Apply the nonlinearity and the map across channels."""
    z = F.gelu(y)
    mixed: Tensor = out_proj(z)
    if output == "glu":
        return F.glu(mixed)
    return z * mixed.sigmoid() if output == "half_glu" else mixed
