"""sLSTM: an LSTM with exponential gates, a normaliser, and heads that do not mix."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.layers.base import SequenceLayer, accumulates
from stateline.layers.mixers.finite_filter import FiniteFilterState
from stateline.layers.mixers.heads import check_normalised, head_sizes
from stateline.layers.mixers.short_conv import ShortConv
from stateline.ops import SLSTMCell, slstm
from stateline.ops.slstm import empty_cell
from stateline.settings import Count, NotNegative


@accumulates("h", "c", "n", "m")
class SLSTMState(NamedTuple):
    """State of the convolution; outputs, sums and their scale."""

    conv: FiniteFilterState
    h: Float[Tensor, "batch head d_head"]
    c: Float[Tensor, "batch head d_head"]
    n: Float[Tensor, "batch head d_head"]
    m: Float[Tensor, "batch head d_head"]


class SLSTM(SequenceLayer[SLSTMState]):
    r"""Scalar long short-term memory with exponential gates.

    .. math::
        i, f &= W_{i,f}\, \mathrm{silu}(\mathrm{conv}(x)_t) + R_{i,f} h_{t-1} + b_{i,f}, \qquad
        z, o = W_{z,o}\, x_t + R_{z,o} h_{t-1} + b_{z,o} \\
        c_t &= \sigma(f) c_{t-1} + e^i \tanh(z), \qquad
        n_t = \sigma(f) n_{t-1} + e^i, \qquad
        h_t = \sigma(o)\, c_t / n_t, \qquad
        y_t = w \odot \mathrm{norm}(h_t)

    W and R are a matrix for each gate and head: heads do not mix. The norm subtracts the mean of a
    head and divides by its standard deviation. The sums are kept divided by the largest input gate,
    see :func:`stateline.ops.slstm`. The recurrence is nonlinear, so it runs one token after the
    other, also in training. Weights other than linear maps and the state stay float32 under a cast
    to half precision.

    Args:
        d_model: Width of input, output and state.
        n_heads: Number of heads; must divide ``d_model``.
        d_conv: Taps of the convolution.
        norm_eps: Added to the variance in the norm.

    Raises:
        InputError: If a size is not positive, the heads do not divide the width, or a head has a
            single number.

    References:
        Beck et al., "xLSTM: Extended Long Short-Term Memory", NeurIPS 2024, section 2.2 and
        appendix A; initial biases as in the official code about halfway through a model, where W
        has the standard deviation :math:`\sqrt{2 / (5\,d)}` for the width d of the layer; here d is
        the width of a head.
    """

    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("bias", "norm_weight"), "no_decay"
    )

    def __init__(
        self, d_model: int, *, n_heads: Count = 4, d_conv: Count = 4, norm_eps: NotNegative = 1e-5
    ) -> None:
        super().__init__(d_model)
        _, self.d_head = head_sizes(d_model, n_heads, None, None)
        check_normalised(d_model, n_heads, self.d_head)
        self.n_heads, self.d_conv, self.norm_eps = n_heads, d_conv, norm_eps
        self.conv = ShortConv(d_model, taps=d_conv)
        scale = (2 / (5 * self.d_head)) ** 0.5
        square = n_heads, self.d_head, 4, self.d_head
        self.weight = nn.Parameter(scale * torch.randn(square))
        self.recurrent = nn.Parameter(torch.zeros(square))
        bias = torch.zeros(4, n_heads, self.d_head)
        bias[1] = torch.linspace(5, -7, self.d_head)
        self.bias = nn.Parameter(bias)
        self.norm_weight = nn.Parameter(torch.ones(n_heads, self.d_head))

    def init_state(self, batch_size: int, *, capacity: int = 0) -> SLSTMState:  # noqa: ARG002
        """Zeros, and the scale of a state that has read nothing."""
        conv = self.conv.init_state(batch_size)
        return SLSTMState(conv, *empty_cell(self.bias, batch_size, self.n_heads, self.d_head))

    @override
    def forward_chunk(self, x: Tensor, state: SLSTMState) -> tuple[Tensor, SLSTMState]:
        convolved, conv = self.conv.forward_chunk(x, state.conv)
        gates = self._gates(convolved, x)
        y, cell = slstm(gates, self.recurrent, SLSTMCell(*state[1:]))
        y = F.layer_norm(y, y.shape[-1:], eps=self.norm_eps) * self.norm_weight
        return y.flatten(-2).to(x.dtype), SLSTMState(conv, *cell)

    def _gates(self, convolved: Tensor, x: Tensor) -> Tensor:
        """What the gates get from the inputs: (batch, length, gate, head, entry)."""
        weight = self.weight.to(x.dtype)  # (head, entry, gate, entry of the gate)
        pairs = (convolved, weight[:, :, :2]), (x, weight[:, :, 2:])
        rows = (t.reshape(-1, self.n_heads, self.d_head).transpose(0, 1) for t, _ in pairs)
        found = [torch.bmm(t, pair.flatten(2)) for t, (_, pair) in zip(rows, pairs, strict=True)]
        gates = torch.cat(found, dim=-1).view(self.n_heads, *x.shape[:-1], 4, self.d_head)
        return gates.permute(1, 2, 3, 0, 4) + self.bias

    def flops_per_token(self, length: int) -> float:
        """The convolution, products with all matrices, 10 operations per entry of a gate."""
        matrices = self.weight.numel() + self.recurrent.numel()
        return super().flops_per_token(length) + 2.0 * matrices + 40.0 * self.d_model
