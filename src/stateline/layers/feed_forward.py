"""Feed-forward: the same two-layer network at each position."""

from typing import Literal, get_args

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stateline.errors import unknown_name
from stateline.layers.base import SequenceLayer

Activation = Literal["gelu", "gelu_exact", "relu", "swiglu"]


class FeedForward(SequenceLayer[tuple[()]]):
    r"""Widen, apply a nonlinearity, narrow: :math:`y = W_2\, \phi(W_1 x + b_1) + b_2`.

    ``swiglu`` gates instead, without biases: :math:`y = W_2 (\mathrm{silu}(W_g x) \odot W_1 x)`.

    Args:
        d_model: Width.
        activation: ``gelu`` (tanh approximation, as in GPT-2 and H3), ``gelu_exact`` (by the
            error function, as in GPT-NeoX), ``relu`` or ``swiglu``.
        d_hidden: Width in between; by default 4 ``d_model``, for ``swiglu`` 8/3 ``d_model`` (as
            many parameters), rounded to a multiple of 8.

    Raises:
        InputError: If the activation is unknown.

    References:
        Vaswani et al., 2017, section 3.3; Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    wants_feed_forward = False

    def __init__(
        self,
        d_model: int,
        *,
        activation: Activation = "gelu",
        d_hidden: int | None = None,
    ) -> None:
        super().__init__(d_model)
        if activation not in get_args(Activation):
            raise unknown_name("activation", activation, get_args(Activation))
        self.activation = activation
        gated = activation == "swiglu"
        if d_hidden is None:
            d_hidden = 8 * round(d_model / 3) if gated else 4 * d_model
        self.in_proj = nn.Linear(d_model, 2 * d_hidden if gated else d_hidden, bias=not gated)
        self.out_proj = nn.Linear(d_hidden, d_model, bias=not gated)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> tuple[()]:  # noqa: ARG002
        """Nothing is remembered."""
        return ()

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Map each position."""
        h = self.in_proj(x)
        if self.activation == "swiglu":
            gate, h = h.chunk(2, dim=-1)
            return self.out_proj(F.silu(gate) * h)
        if self.activation == "relu":
            return self.out_proj(F.relu(h))
        approximate = "tanh" if self.activation == "gelu" else "none"
        return self.out_proj(F.gelu(h, approximate=approximate))

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: tuple[()]
    ) -> tuple[Float[Tensor, "batch length d_model"], tuple[()]]:
        """Map each position."""
        return self(x), state

    def step(
        self, x: Float[Tensor, "batch d_model"], state: tuple[()]
    ) -> tuple[Float[Tensor, "batch d_model"], tuple[()]]:
        """Map the position."""
        return self(x), state
