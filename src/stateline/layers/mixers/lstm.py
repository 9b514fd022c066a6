"""LSTM: the classic gated recurrence."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.layers.base import SequenceLayer, accumulates, zeros
from stateline.layers.dropout import Dropout
from stateline.ops import LSTMCell, LSTMWeights, lstm
from stateline.settings import Count, Fraction

_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


@accumulates("h", "c")
class LSTMState(NamedTuple):
    """Output and cell of each layer."""

    h: Float[Tensor, "batch n_layers d_model"]
    c: Float[Tensor, "batch n_layers d_model"]


class LSTM(SequenceLayer[LSTMState]):
    r"""Long short-term memory, one or more layers.

    .. math::
        i, f, g, o = W x_t + U h_{t-1} + b, \qquad
        c_t = \sigma(f) \odot c_{t-1} + \sigma(i) \odot \tanh(g), \qquad
        h_t = \sigma(o) \odot \tanh(c_t)

    The recurrence is nonlinear, so it runs one token after the other, also in training. Weights and
    state stay float32 under a cast to half precision, since rounding errors accumulate.

    Args:
        d_model: Width of input, output and state.
        n_layers: Number of layers.
        dropout: Probability that an entry between two layers is dropped in training.

    Raises:
        InputError: If ``n_layers`` is not positive.

    References:
        Hochreiter and Schmidhuber, 1997, with the forget gate of Gers et al., 2000.
    """

    wants_feed_forward = False
    keeps_float32 = True

    def __init__(self, d_model: int, *, n_layers: Count = 1, dropout: Fraction = 0.0) -> None:
        super().__init__(d_model)
        self.n_layers = n_layers
        self.dropout = Dropout(dropout)
        bound = d_model**-0.5
        for layer in range(n_layers):
            for name in _WEIGHTS:
                shape = (4 * d_model, d_model) if name.startswith("weight") else (4 * d_model,)
                parameter = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
                self.register_parameter(f"{name}_l{layer}", parameter)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> LSTMState:  # noqa: ARG002
        """Zero state."""
        weight = next(self.parameters())
        h = zeros(weight, batch_size, self.n_layers, self.d_model)
        return LSTMState(h, h.clone())

    @override
    def forward_chunk(self, x: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        weights = [self._weights(layer) for layer in range(self.n_layers)]
        dtype = weights[0].w_ih.dtype
        y, after = x.to(dtype), []
        cells = zip(*(part.to(dtype).unbind(dim=1) for part in state), strict=True)
        for layer, (h, c) in enumerate(cells):
            y = self.dropout(y) if layer else y
            y, cell = lstm(y, weights[layer], LSTMCell(h, c))
            after.append(cell)
        h, c = (torch.stack(parts, dim=1) for parts in zip(*after, strict=True))
        return y.to(x.dtype), LSTMState(h, c)

    def _weights(self, layer: int) -> LSTMWeights:
        """Weights by their names: pruned or parametrized ones are no parameters of this module."""
        return LSTMWeights(*(getattr(self, f"{name}_l{layer}") for name in _WEIGHTS))

    def flops_per_token(self, length: int) -> float:  # noqa: ARG002
        """Products with all weights, and about 10 operations per channel for the gates."""
        weights = sum(p.numel() for p in self.parameters() if p.ndim == 2)
        return 2.0 * weights + 10.0 * self.n_layers * self.d_model
