"""Feed-forward: the same two-layer network at every position."""

from typing import Any, Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import SequenceLayer
from stateline.layers.dropout import Dropout
from stateline.layers.linear import scaled_linear
from stateline.layers.plain import is_plain_with_bias
from stateline.ops import FeedForwardWeights, feed_forward, swiglu
from stateline.settings import Count, Fraction

Activation = Literal["gelu", "gelu_exact", "relu", "relu2", "swiglu", "geglu", "geglu_exact"]

GATED = ("swiglu", "geglu", "geglu_exact")
"""Activations that multiply two maps of the input."""


def default_hidden(d_model: int, activation: str) -> int:
    """Hidden width: 4 ``d_model``, for gates 8/3 of it, rounded to a multiple of 8.

    Example:
        >>> default_hidden(64, "gelu"), default_hidden(64, "swiglu")
        (256, 168)
    """
    return 8 * round(d_model / 3) if activation in GATED else 4 * d_model


def activated(h: Float[Tensor, "*batch hidden"], activation: str, *, decodes: bool) -> Tensor:
    """The nonlinearity of a feed-forward; gates take the first half of the entries."""
    if activation == "swiglu" and not decodes:  # not for one token
        return swiglu(h)
    if activation in GATED:
        gate, h = h.chunk(2, dim=-1)
        if activation == "swiglu":
            return h * F.silu(gate)
        return h * F.gelu(gate, approximate="tanh" if activation == "geglu" else "none")
    if activation in ("relu", "relu2"):
        h = F.relu(h)
        return h if activation == "relu" else h.square()
    return F.gelu(h, approximate="tanh" if activation == "gelu" else "none")


class Positionwise(SequenceLayer[tuple[()]]):
    """A layer that maps every position by itself, without a state.

    Abstract: subclasses define ``forward``.
    """

    wants_feed_forward = False
    is_feed_forward = True
    any_batch_axes = True

    def init_state(self, batch_size: int, *, capacity: int = 0) -> tuple[()]:  # noqa: ARG002
        """Empty: the layer has no memory."""
        return ()

    @override
    def forward_chunk(self, x: Tensor, state: tuple[()], **_: Any) -> tuple[Tensor, tuple[()]]:
        return self(x), state

    @override
    def step(self, x: Tensor, state: tuple[()]) -> tuple[Tensor, tuple[()]]:
        return self(x), state

    @override
    def step_(self, x: Tensor, state: tuple[()]) -> Tensor:
        return self(x)


class FeedForward(Positionwise):
    r"""Two linear maps with a nonlinearity between: :math:`y = W_2\, \phi(W_1 x + b_1) + b_2`.

    ``swiglu`` gates instead: :math:`y = W_2 (\mathrm{silu}(W_g x) \odot W_1 x)`; so does ``geglu``,
    by GELU (tanh approximation), and ``geglu_exact`` by GELU with the error function.

    Args:
        d_model: Width of input and output.
        activation: ``gelu`` (tanh approximation, as in GPT-2 and H3), ``gelu_exact`` (by the
            error function, as in GPT-NeoX), ``relu``, ``relu2`` (the square of ``relu``),
            ``swiglu``, ``geglu`` or ``geglu_exact``.
        d_hidden: Hidden width; by default 4 ``d_model``, for gates 8/3 ``d_model`` (the same
            number of parameters), rounded to a multiple of 8.
        bias: Whether the maps have biases; by default all but gates.
        dropout: Probability that a hidden unit is dropped in training.
        gate_scale: Constant factor of the gate before its nonlinearity.
        out_scale: Constant factor of the output.

    Raises:
        InputError: If the activation is unknown, ``d_hidden`` is not positive, or ``gate_scale`` is
            set without a gate.

    References:
        Vaswani et al., 2017, section 3.3; Shazeer, "GLU Variants Improve Transformer", 2020;
        ``relu2``: So et al., "Primer", 2021.
    """

    def __init__(
        self,
        d_model: int,
        *,
        activation: Activation = "gelu",
        d_hidden: Count | None = None,
        bias: bool | None = None,
        dropout: Fraction = 0.0,
        gate_scale: float = 1.0,
        out_scale: float = 1.0,
    ) -> None:
        super().__init__(d_model)
        gated = activation in GATED
        bias = not gated if bias is None else bias
        if d_hidden is None:
            d_hidden = default_hidden(d_model, activation)
        self.activation, self.d_hidden, self.bias = activation, d_hidden, bias
        if gate_scale != 1 and not gated:
            raise InputError(f"gate_scale needs a gate, got {gate_scale=} and {activation=}")
        self.gate_scale, self.out_scale = gate_scale, out_scale
        gate = [(d_hidden, gate_scale)] if gated else []
        self.in_proj = scaled_linear(d_model, *gate, (d_hidden, 1.0), bias=bias)
        self.out_proj = scaled_linear(d_hidden, (d_model, out_scale), bias=bias)
        self.dropout = Dropout(dropout)

    @override
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        a, b = self.in_proj, self.out_proj
        pays = self.activation == "gelu" and x.ndim > 2  # not for one token
        if pays and not self.dropout.rate and is_plain_with_bias(a) and is_plain_with_bias(b):
            return feed_forward(x, FeedForwardWeights(a.weight, a.bias, b.weight, b.bias))
        h = activated(a(x), self.activation, decodes=self.decodes)
        return b(self.dropout(h) if self.dropout.rate else h)
