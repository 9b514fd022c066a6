"""Linear attention: attention without the softmax; its state is one matrix per head."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import SequenceLayer, accumulates, records, zeros
from stateline.layers.documents import Documents, mask_of
from stateline.layers.linear import Linear
from stateline.layers.mixers.heads import MixesValues, head_sizes, weights_of
from stateline.ops import (
    LinearSignals,
    linear_attention,
    linear_attention_step,
    linear_attention_step_,
)
from stateline.ops.linear_attention import CHUNK
from stateline.settings import Count

Feature = Literal["elu", "relu", "identity", "taylor", "random"]


def taylor(x: Float[Tensor, "*shape d_head"]) -> Float[Tensor, "*shape feature"]:
    """Features whose products are the exponential's Taylor series to the second order."""
    x = x / x.shape[-1] ** 0.25
    squares = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
    return torch.cat([torch.ones_like(x[..., :1]), x, squares], dim=-1)


FEATURES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "identity": lambda x: x,
    "taylor": taylor,
}
EPS = 1e-6
"""Added to the normaliser, which is zero if all features are."""


@accumulates("s")
class LinearAttentionState(NamedTuple):
    """Sum of products of keys and values; for a normaliser, a last value that is always one."""

    s: Float[Tensor, "batch head feature d_value"]


class MatrixAttention(SequenceLayer[Any], MixesValues):
    """Linear attention, with or without a decay; its state is one matrix per head.

    Abstract: subclasses say which queries, keys, values and decays follow from the input, and how
    the output of the heads becomes the output of the layer. The state stays float32 under a cast to
    half precision.

    Attributes:
        chunk: Tokens inside which the layer attends.
    """

    chunk: ClassVar[int] = CHUNK
    out_proj: nn.Linear

    def __init__(self, d_model: int, n_heads: int, d_key: int, d_value: int) -> None:
        super().__init__(d_model)
        self.n_heads, self.d_key, self.d_value = n_heads, d_key, d_value

    @abstractmethod
    def signals(
        self,
        x: Float[Tensor, "batch *length d_model"],
        state: Any,
        starts: Documents | None = None,
        /,
    ) -> tuple[Any, ...]:
        """Queries, keys, values (..., head, entry), logarithmic decays, and what ``read`` needs."""

    @abstractmethod
    def read(self, y: Float[Tensor, "batch *length head d_value"], gate: Any) -> Tensor:
        """Output, from the output of the heads and the input of the gate."""

    def after(self, state: Any, s: Tensor, gate: Any) -> Any:  # noqa: ARG002
        """The state after the tokens; its matrices are ``s``."""
        return state._replace(s=s)

    def mixing(self, x: Tensor) -> Tensor:
        """The products of queries and decayed keys, normalised if the layer does so."""
        state = self.init_state(len(x))
        q, k, v, decay, gate = self.signals(x, state)
        weights = weights_of(
            lambda values: linear_attention(LinearSignals(q, k, values, decay), state.s)[0], v
        )
        return self.normalised(weights, gate)

    def normalised(
        self,
        weights: Float[Tensor, "batch head length length"],
        gate: Any,  # noqa: ARG002
    ) -> Tensor:
        """The weights of values, from the products of queries and keys."""
        return weights

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:  # noqa: ARG002
        """Zero state."""
        s = zeros(self.out_proj.weight, batch_size, self.n_heads, self.d_key, self.d_value)
        return LinearAttentionState(s.to(torch.promote_types(s.dtype, torch.float32)))

    @override
    def forward_chunk(
        self, x: Tensor, state: Any, starts: Documents | None = None
    ) -> tuple[Tensor, Any]:
        *signals, gate = self.signals(x, state, starts)
        y, s = linear_attention(LinearSignals(*signals), state.s, starts=mask_of(starts))
        return self.read(y, gate), self.after(state, s, gate)

    @override
    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        *signals, gate = self.signals(x, state)
        y, s = linear_attention_step(LinearSignals(*signals), state.s)
        return self.read(y, gate), self.after(state, s, gate)

    @override
    def step_(self, x: Tensor, state: Any) -> Tensor:
        if not self.decodes and records(x):
            return super().step_(x, state)
        *signals, gate = self.signals(x, state)
        return self.read(linear_attention_step_(LinearSignals(*signals), state.s), gate)

    def flops_per_token(self, length: int) -> float:
        """Linear maps, products with the state, and attention inside a chunk."""
        heads, keys, values = self.init_state(1).s.shape[1:]
        inside = 2.0 * heads * min(length, self.chunk) * (keys + values)
        return super().flops_per_token(length) + inside + 4.0 * heads * keys * values


def expanded(d_model: int, n_heads: int, **factors: float) -> list[int]:
    """Width of a head for each multiple of the model's width."""
    widths = []
    for name, factor in factors.items():
        width = round(factor * d_model)
        if width < 1 or width % n_heads:
            raise InputError(
                f"n_heads must divide {name} * d_model, got {n_heads=}, {name}={factor} and "
                f"{d_model=}"
            )
        widths.append(width // n_heads)
    return widths


class LinearAttention(MatrixAttention):
    r"""Multi-head causal attention with a feature map in place of the softmax.

    .. math::
        S_t = S_{t-1} + \phi(k_t) v_t^\top, \quad z_t = z_{t-1} + \phi(k_t), \qquad
        y_t = W_o \left[ \frac{S_t^\top \phi(q_t)}{z_t \cdot \phi(q_t) + 10^{-6}} \right]_h

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

    With ``feature=taylor``, as in Based,

    .. math::
        \phi(x) = \left[ 1,\ x',\ \frac{\mathrm{vec}(x' x'^\top)}{\sqrt{2}} \right], \qquad
        \phi(q) \cdot \phi(k) = 1 + u + \frac{u^2}{2} \ge \frac12, \quad
        u = \frac{q \cdot k}{\sqrt{d_{head}}}

    the weights are softmax attention's exponentials up to the second order. A head has
    :math:`1 + d_{head} + d_{head}^2` features, so heads must be narrow: Based takes
    :math:`d_{head} = 16`, 273 features.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads; must divide ``d_model`` unless ``d_head`` is given.
        d_head: Width of a head; by default ``d_model / n_heads``.
        feature: The map :math:`\phi`: ``elu`` (plus one, always positive), ``relu``, ``identity``,
            ``taylor`` or ``random``.
        n_features: Number of random features; by default :math:`d_{head} \ln d_{head}`.
        normalise: Whether to divide by :math:`z_t \cdot \phi(q_t)`.

    Raises:
        InputError: If ``n_heads`` does not divide ``d_model``, the feature map is unknown, it can
            be negative and there is a normaliser, or ``n_features`` does not fit it.

    References:
        Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear
        Attention", ICML 2020, section 3; Choromanski et al., "Rethinking Attention with
        Performers", ICLR 2021, lemma 1; Arora et al., "Simple linear attention language models
        balance the recall-throughput tradeoff", ICML 2024, section 4.1.
    """

    projection: Float[Tensor, "feature d_head"]

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: Count = 4,
        d_head: Count | None = None,
        feature: Feature = "elu",
        n_features: Count | None = None,
        normalise: bool = True,
    ) -> None:
        _, self.d_head = head_sizes(d_model, n_heads, None, d_head)
        super().__init__(d_model, n_heads, self.d_head, self.d_head + normalise)
        if n_features is not None and feature != "random":
            raise InputError(f"n_features is for feature='random' alone, got {feature=}")
        if feature == "identity" and normalise:
            raise InputError(
                "a normaliser needs features that are not negative, got feature='identity': "
                "set normalise=False, or take another feature"
            )
        self.feature, self.normalise, self.n_features = feature, normalise, self.d_head
        if feature == "random":
            default = max(1, int(self.d_head * math.log(self.d_head)))
            self.n_features = self.d_key = n_features or default
            self.register_buffer("projection", _directions(self.n_features, self.d_head))
        elif feature == "taylor":
            self.d_key = 1 + self.d_head + self.d_head**2
        inner = n_heads * self.d_head
        self.qkv = Linear(d_model, [inner] * 3, bias=False, heads=n_heads)
        self.out_proj = Linear(inner, d_model, bias=False)

    def flops_per_token(self, length: int) -> float:
        """Projections, products with the state, attention inside a chunk, and random features."""
        features = (
            4.0 * self.n_features * self.n_heads * self.d_head if self.feature == "random" else 0
        )
        return super().flops_per_token(length) + features

    def signals(self, x: Tensor, *_: Any) -> tuple[Any, ...]:
        """Features of queries and keys, and values; nothing decays, and there is no gate."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, self.d_head)).unbind(dim=-3)
        feature = FEATURES.get(self.feature, self._random_features)
        v = F.pad(v, (0, 1), value=1.0) if self.normalise else v
        return feature(q), feature(k), v, None, None

    def read(self, y: Tensor, gate: None) -> Tensor:  # noqa: ARG002
        """Divide by the normaliser."""
        if self.normalise:
            y = y[..., :-1] / (y[..., -1:] + EPS)
        return self.out_proj(y.flatten(-2))

    def normalised(self, weights: Tensor, gate: None) -> Tensor:  # noqa: ARG002
        """Divided by their sum."""
        return weights / (weights.sum(-1, keepdim=True) + EPS) if self.normalise else weights

    def _random_features(self, x: Float[Tensor, "*shape d_head"]) -> Tensor:
        x = x / self.d_head**0.25
        return (x @ self.projection.mT - x.square().sum(-1, keepdim=True) / 2).exp()


def _directions(count: int, width: int) -> Float[Tensor, "feature d_head"]:
    """Normal vectors, orthogonal to each other in groups of ``width``."""
    groups = torch.randn(-(-count // width), width, width)
    q, r = torch.linalg.qr(groups)
    turned = (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT.flatten(0, 1)
    return (turned * torch.randn_like(turned).norm(dim=-1, keepdim=True))[:count]
