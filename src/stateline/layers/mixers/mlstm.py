"""mLSTM: linear attention with exponential input gates, as in xLSTM."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.layers.base import SequenceLayer, accumulates, zeros
from stateline.layers.documents import Documents
from stateline.layers.linear import Linear
from stateline.layers.mixers.heads import check_normalised
from stateline.layers.mixers.linear_attention import MatrixAttention, expanded
from stateline.settings import Count, Factor, NotNegative, Positive


@accumulates("s", "m")
class MLSTMState(NamedTuple):
    """Sum of products of keys and values (the last value is one), and the logarithm of its scale.

    The sum itself is ``s`` times the exponential of ``m``.
    """

    s: Float[Tensor, "batch head d_key d_value"]
    m: Float[Tensor, "batch head"]


class MLSTM(MatrixAttention):
    r"""Long short-term memory whose cells are matrices.

    .. math::
        C_t = \sigma(f_t) C_{t-1} + e^{i_t} k_t v_t^\top, \quad
        n_t = \sigma(f_t) n_{t-1} + e^{i_t} k_t, \qquad
        y = W_o \left( \Bigl[ \mathrm{norm}\Bigl(
        \frac{C_t^\top q_t}{\max(|n_t \cdot q_t|, 1)} \Bigr) \Bigr]_h \odot \sigma(z_t) \right)

    with queries divided by :math:`\sqrt{d_k}`. The gates i and f of a head are
    :math:`c \tanh(g / c)` for c = ``soft_cap`` and a linear map g. The norm acts on each head; it
    subtracts the mean and has a weight. C and n are kept divided by :math:`e^{m_t}`, where
    :math:`m_t = \max(\ln \sigma(f_t) + m_{t-1}, i_t)`, so that nothing overflows. The biases of the
    gates, the weight of the norm and the state stay float32 under a cast to half precision.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads, which divides the widths of keys and values.
        expand_k: Width of the keys of all heads, in units of ``d_model``.
        expand_v: Width of the values of all heads, in units of ``d_model``.
        soft_cap: Largest size c of the gates.
        norm_eps: Added to the variance in the norm.
        divisor_eps: Added to the divisor, after C and n were divided by :math:`e^{m_t}`.

    Raises:
        InputError: If the heads do not fit the widths, the values of a head are a single number, or
            ``soft_cap`` is not positive.

    References:
        Beck et al., "xLSTM: Extended Long Short-Term Memory", NeurIPS 2024, section 2.3; sizes,
        norm and soft cap: Beck et al., "xLSTM 7B", 2025, section 3. Biases of the gates begin as
        in official code, where the weights of the gates begin at zero.
    """

    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("gate_bias", "norm_weight"), "no_decay"
    )

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: Count = 4,
        expand_k: Factor = 0.5,
        expand_v: Factor = 1.0,
        soft_cap: Positive = 15.0,
        norm_eps: NotNegative = 1e-6,
        divisor_eps: NotNegative = 0.0,
    ) -> None:
        d_key, d_value = expanded(d_model, n_heads, expand_k=expand_k, expand_v=expand_v)
        super().__init__(d_model, n_heads, d_key, d_value)
        check_normalised(d_model, n_heads, d_value)
        self.expand_k, self.expand_v = expand_k, expand_v
        self.soft_cap, self.norm_eps, self.divisor_eps = soft_cap, norm_eps, divisor_eps
        self.sizes = [n_heads * d for d in (d_key, d_key, d_value, d_value)] + [2 * n_heads]
        self.in_proj = Linear(d_model, self.sizes, bias=False, heads=[n_heads] * 4 + [1])
        bias = torch.full((2, n_heads), -10.0)
        bias[1] = torch.linspace(3.0, 6.0, n_heads)
        self.gate_bias = nn.Parameter(bias.flatten())
        self.norm_weight = nn.Parameter(torch.ones(n_heads, d_value))
        self.out_proj = Linear(n_heads * d_value, d_model, bias=False)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> MLSTMState:  # noqa: ARG002
        """Zeros, of scale one."""
        s = zeros(self.gate_bias, batch_size, self.n_heads, self.d_key, self.d_value + 1)
        return MLSTMState(s, s.new_zeros(s.shape[:2]))

    def signals(
        self, x: Tensor, state: MLSTMState, starts: Documents | None = None
    ) -> tuple[Any, ...]:
        """Queries, scaled keys, values with a one, decays of the scaled sums, gate and scales."""
        q, k, v, gate, both = self.in_proj(x).split(self.sizes, dim=-1)
        both = (both + self.gate_bias).to(state.s.dtype)
        write, keep = (self.soft_cap * (both / self.soft_cap).tanh()).chunk(2, dim=-1)
        keep = F.logsigmoid(keep)
        gates = (write, keep) if self.divisor_eps else (write.detach(), keep.detach())
        before, m = self._scales(*gates, state.m, starts)
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)) for t in (q, k, v))
        k = k * (write - m).exp()[..., None]
        return (
            q.to(k.dtype) * self.d_key**-0.5,
            k,
            F.pad(v, (0, 1), value=1.0),
            keep + before - m,
            (gate, m),
        )

    def _scales(
        self, write: Tensor, keep: Tensor, m: Tensor, starts: Documents | None
    ) -> tuple[Tensor, Tensor]:
        """Logarithms of the scales before and after each token.

        Without ``divisor_eps``, outputs do not depend on them, so they are constants for gradients.
        The maps from one scale to the next, max(keep + m, write), are composed for 1, 2, 4, ...
        tokens.
        """
        if write.ndim == m.ndim:
            return m, torch.maximum(keep + m, write)
        # A gate that is no number spoils its token by its key and its decay, not by the scales.
        write, keep = write.nan_to_num(), keep.nan_to_num()
        if starts is not None:  # a document begins with scale one, whose logarithm is zero
            begins = starts.mask[..., None]
            write = torch.where(begins, torch.maximum(keep, write), write)
            keep = keep.masked_fill(begins, -torch.inf)
        after, total = torch.cat([m[:, None], write], dim=1), torch.cat([m[:, None], keep], dim=1)
        span = 1
        while span < after.shape[1]:
            later = torch.maximum(after[:, span:], total[:, span:] + after[:, :-span])
            after = torch.cat([after[:, :span], later], dim=1)
            total = torch.cat([total[:, :span], total[:, span:] + total[:, :-span]], dim=1)
            span *= 2
        before = after[:, :-1]
        return before if starts is None else before.masked_fill(begins, 0.0), after[:, 1:]

    def read(self, y: Tensor, gate: tuple[Tensor, Tensor]) -> Tensor:
        """Divide by the normaliser, normalise each head, and gate."""
        output, m = gate
        y = y / (torch.maximum(y[..., -1:].abs(), (-m).exp()[..., None]) + self.divisor_eps)
        normed = F.layer_norm(y[..., :-1], (self.d_value,), eps=self.norm_eps) * self.norm_weight
        return self.out_proj(normed.flatten(-2).to(output.dtype) * output.sigmoid())

    def normalised(self, weights: Tensor, gate: tuple[Tensor, Tensor]) -> Tensor:
        """Divided as the values are in :meth:`read`."""
        least = (-gate[1]).exp().mT[..., None]
        return weights / (
            torch.maximum(weights.sum(-1, keepdim=True).abs(), least) + self.divisor_eps
        )

    def after(self, state: MLSTMState, s: Tensor, gate: tuple[Tensor, Tensor]) -> MLSTMState:
        """The sums and their scale after the tokens."""
        m = gate[1]
        if m.ndim > state.m.ndim:
            m = torch.cat([state.m[:, None], m], dim=1)[:, -1]
        return MLSTMState(s, m.clone())

    @override
    def step_(self, x: Tensor, state: MLSTMState) -> Tensor:
        return SequenceLayer.step_(self, x, state)
