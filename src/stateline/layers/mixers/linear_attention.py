"""Linear attention: attention without the softmax; its state is one matrix per head."""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stateline.errors import InputError, check_choice
from stateline.layers.base import SequenceLayer, accumulates, records, zeros
from stateline.layers.documents import Documents, mask_of
from stateline.layers.linear import Linear
from stateline.layers.mixers.heads import head_sizes
from stateline.ops import (
    LinearSignals,
    linear_attention,
    linear_attention_step,
    linear_attention_step_,
)
from stateline.ops.linear_attention import CHUNK

Feature = Literal["elu", "relu", "identity", "random"]
FEATURES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "identity": lambda x: x,
}
EPS = 1e-6
"""Added to the normaliser, which is zero if all features are."""


@accumulates("s")
class LinearAttentionState(NamedTuple):
    """Sum of products of keys and values; for a normaliser, a last value that is always one."""

    s: Float[Tensor, "batch head feature d_value"]


class LinearAttention(SequenceLayer[LinearAttentionState]):
    r"""Multi-head causal attention with a feature map in place of the softmax.

    .. math::
        S_t = S_{t-1} + \phi(k_t) v_t^\top, \quad z_t = z_{t-1} + \phi(k_t), \qquad
        y_t = W_o \left[ \frac{S_t^\top \phi(q_t)}{z_t \cdot \phi(q_t)} \right]_h

    The state has a constant size; the sum never forgets. The output does not depend on the order of
    earlier tokens. The state stays float32 under a cast to half precision.

    With ``feature=random``, the positive random features of a Performer,

    .. math::
        \phi(x)_i = \exp\left( w_i \cdot x' - \frac{\|x'\|^2}{2} \right), \qquad
        x' = \frac{x}{d_{head}^{1/4}}

    the weights of earlier tokens approach softmax attention's as the number of features
    grows. The :math:`w_i` are normal vectors, orthogonal to each other in groups of
    :math:`d_{head}`; the heads share them. They are drawn with the initial weights, and not drawn
    again in training, as official code can do.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads; must divide ``d_model``.
        feature: The map :math:`\phi`: ``elu`` (plus one, always positive), ``relu``, ``identity``
            or ``random``.
        n_features: Number of random features; by default :math:`d_{head} \ln d_{head}`.
        normalise: Whether to divide by :math:`z_t \cdot \phi(q_t)`.

    Raises:
        InputError: If ``n_heads`` does not divide ``d_model``, the feature map is unknown, it can
            be negative and there is a normaliser, or ``n_features`` does not fit it.

    References:
        Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear
        Attention", ICML 2020, section 3; Choromanski et al., "Rethinking Attention with
        Performers", ICLR 2021, lemma 1.
    """

    packs = True
    projection: Float[Tensor, "feature d_head"]

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        feature: Feature = "elu",
        n_features: int | None = None,
        normalise: bool = True,
    ) -> None:
        super().__init__(d_model)
        _, self.d_head = head_sizes(d_model, n_heads, None, None)
        check_choice("feature", feature, (*FEATURES, "random"))
        if n_features is not None and (feature != "random" or n_features < 1):
            raise InputError(
                "n_features must be at least 1, and is for feature='random' alone, got "
                f"{n_features=} and {feature=}"
            )
        if feature == "identity" and normalise:
            raise InputError(
                "a normaliser needs features that are not negative, got feature='identity': "
                "set normalise=False, or take another feature"
            )
        self.n_heads, self.n_features = n_heads, self.d_head
        self.feature, self.normalise = feature, normalise
        if feature == "random":
            default = max(1, int(self.d_head * math.log(self.d_head)))
            self.n_features = n_features or default
            self.register_buffer("projection", _directions(self.n_features, self.d_head))
        self.qkv = Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = Linear(d_model, d_model, bias=False)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> LinearAttentionState:  # noqa: ARG002
        """Zero state."""
        values = self.d_head + self.normalise
        s = zeros(self.qkv.weight, batch_size, self.n_heads, self.n_features, values)
        return LinearAttentionState(s.to(torch.promote_types(s.dtype, torch.float32)))

    def _forward_chunk(
        self, x: Tensor, state: LinearAttentionState, starts: Documents | None = None
    ) -> tuple[Tensor, LinearAttentionState]:
        y, s = linear_attention(self._project(x), state.s, starts=mask_of(starts))
        return self._merge(y), LinearAttentionState(s)

    def _step(self, x: Tensor, state: LinearAttentionState) -> tuple[Tensor, LinearAttentionState]:
        y, s = linear_attention_step(self._project(x), state.s)
        return self._merge(y), LinearAttentionState(s)

    def _step_(self, x: Tensor, state: LinearAttentionState) -> Tensor:
        if records(x):
            return super()._step_(x, state)
        return self._merge(linear_attention_step_(self._project(x), state.s))

    def flops_per_token(self, length: int) -> float:
        """Projections, products with the state, and attention inside a chunk."""
        heads, keys, values = self.init_state(1).s.shape[1:]
        mixing = heads * (2.0 * min(length, CHUNK) * (keys + values) + 4.0 * keys * values)
        if self.feature == "random":
            mixing += 4.0 * self.n_features * self.d_model
        return super().flops_per_token(length) + mixing

    def _project(self, x: Tensor) -> LinearSignals:
        """Features of queries and of keys (..., head, feature), and values (..., head, d_value)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, self.d_head)).unbind(dim=-3)
        feature = FEATURES.get(self.feature, self._random_features)
        v = F.pad(v, (0, 1), value=1.0) if self.normalise else v
        return LinearSignals(feature(q), feature(k), v)

    def _random_features(self, x: Float[Tensor, "*shape d_head"]) -> Tensor:
        x = x / self.d_head**0.25
        return (x @ self.projection.mT - x.square().sum(-1, keepdim=True) / 2).exp()

    def _merge(self, y: Float[Tensor, "batch *length head d_value"]) -> Tensor:
        if self.normalise:
            y = y[..., :-1] / (y[..., -1:] + EPS)
        return self.out_proj(y.flatten(-2))


def _directions(count: int, width: int) -> Float[Tensor, "feature d_head"]:
    """Normal vectors, orthogonal to each other in groups of ``width``."""
    groups = torch.randn(-(-count // width), width, width)
    q, r = torch.linalg.qr(groups)
    turned = (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT.flatten(0, 1)
    return (turned * torch.randn_like(turned).norm(dim=-1, keepdim=True))[:count]
