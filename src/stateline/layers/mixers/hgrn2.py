"""HGRN2: a gated linear recurrence whose key is one minus the forget gate."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.linear import Linear
from stateline.layers.mixers.linear_attention import LinearAttentionState, MatrixAttention, expanded
from stateline.layers.norm import RMSNorm
from stateline.ops.linear_attention import SHORT
from stateline.settings import Count, Factor, Fraction, NotNegative


class HGRN2(MatrixAttention):
    r"""Gated linear recurrent network with an expanded state.

    .. math::
        S_t = \mathrm{diag}(f_t) S_{t-1} + (1 - f_t) v_t^\top, \qquad
        y = W_o\, \mathrm{norm}([S_t^\top \mathrm{silu}(q_t)]_h)

    The forget gate :math:`f_t = \ell + (1 - \ell)\, \sigma(W_f x_t)` is never below the lower bound
    :math:`\ell`, and :math:`1 - f_t` is the key. The norm divides by the root mean square over all
    heads.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads, which divides the widths of gates and values.
        expand_k: Width of the gates of all heads, in units of ``d_model``.
        lower_bound: Lower bound :math:`\ell` of the forget gate, from 0 to less than 1.
        learns_bound: Whether the bound is a parameter for each entry, initially ``lower_bound``.
        norm_eps: Added to the mean square in the norm.

    Raises:
        InputError: If the heads do not fit the widths, or the bound is not from 0 to 1.

    References:
        Qin et al., "HGRN2: Gated Linear RNNs with State Expansion", COLM 2024, section 3.
    """

    # Differs from the paper: there the bounds of all layers are learned together, as a cumulative
    # softmax over the layers. Here each layer has its own, the sigmoid of a parameter. The code of
    # fla also divides queries by the root of their width, which the norm undoes up to norm_eps.

    keeps_float32 = True
    chunk = SHORT

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: Count = 4,
        expand_k: Factor = 1.0,
        lower_bound: Fraction = 0.0,
        learns_bound: bool = False,
        norm_eps: NotNegative = 1e-5,
    ) -> None:
        d_key, d_value = expanded(d_model, n_heads, expand_k=expand_k, expand_v=1)
        super().__init__(d_model, n_heads, d_key, d_value)
        self.expand_k, self.lower_bound, self.norm_eps = expand_k, lower_bound, norm_eps
        if learns_bound and not lower_bound:
            raise InputError(
                "learns_bound=True begins at lower_bound, which must be above 0, got 0"
            )
        begin = torch.full((n_heads * d_key,), lower_bound).logit()
        self.learns_bound = learns_bound
        self.bound = nn.Parameter(begin) if learns_bound else None
        self.sizes = [n_heads * d_key, n_heads * d_key, d_model]
        self.in_proj = Linear(d_model, self.sizes, bias=False, heads=n_heads)
        self.norm = RMSNorm(d_model, eps=norm_eps)
        self.out_proj = Linear(d_model, d_model, bias=False)

    def signals(self, x: Tensor, state: LinearAttentionState, *_: Any) -> tuple[Any, ...]:
        """Queries, keys, values and the logarithms of the forget gates; there is no gate."""
        q, f, v = self.in_proj(x).split(self.sizes, dim=-1)
        q, f, v = (t.unflatten(-1, (self.n_heads, -1)) for t in (q, f, v))
        f = f.to(torch.promote_types(state.s.dtype, torch.float32))  # states may be 16-bit
        if self.bound is None:
            log_forget, keep = F.logsigmoid(f), (1 - self.lower_bound) * torch.sigmoid(-f)
            log_forget = torch.log1p(-keep) if self.lower_bound else log_forget
        else:
            bound = self.bound.to(f.dtype).view(self.n_heads, -1)
            keep = torch.sigmoid(-bound) * torch.sigmoid(-f)
            free = F.logsigmoid(-bound) + F.logsigmoid(f)
            log_forget = torch.logaddexp(F.logsigmoid(bound), free)
        return F.silu(q), keep.to(v.dtype), v, log_forget, None

    def read(self, y: Tensor, gate: Tensor | None) -> Tensor:  # noqa: ARG002
        """Normalise all heads together."""
        return self.out_proj(self.norm(y.flatten(-2)))
