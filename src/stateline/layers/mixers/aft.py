"""Attention free transformer: weighted means of values, with weights for each channel."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.layers.base import SequenceLayer, accumulates, zeros
from stateline.layers.linear import Linear
from stateline.layers.mixers.heads import head_sizes
from stateline.ops.containment import contained
from stateline.settings import Count

_NOTHING = -1e30
"""Key of a token that does not exist: its weight is zero."""


class Weighted(NamedTuple):
    r"""Sums of values by weights :math:`e^k`, and of these weights, divided by :math:`e^m`.

    Attributes:
        level: m, the largest k.
        sums: Of values and of weights.
    """

    level: Float[Tensor, "*batch d_model"]
    sums: Float[Tensor, "*batch d_model 2"]

    def and_also(self, more: "Weighted") -> "Weighted":
        """The sums over both."""
        level = torch.maximum(self.level, more.level)
        kept = [own.sums * (own.level - level).exp()[..., None] for own in (self, more)]
        return Weighted(level, kept[0] + kept[1])


@accumulates("level", "sums", "keys", "values")  # keys are exponents
class AFTState(NamedTuple):
    """The latest keys and values, and sums over all before them, as in :class:`Weighted`."""

    level: Float[Tensor, "batch d_model"]
    sums: Float[Tensor, "batch d_model 2"]
    keys: Float[Tensor, "batch past d_model"]
    values: Float[Tensor, "batch past d_model"]


class AFT(SequenceLayer[AFTState]):
    r"""AFT-conv: each channel averages values by its own keys and by the distance.

    .. math::
        y_t = W_o \left[ \sigma(q_t) \odot
        \frac{\sum_{s \le t} e^{k_s + w_{t-s}} \odot v_s}{\sum_{s \le t} e^{k_s + w_{t-s}}} \right]

    with :math:`w_j` for each head and distance j below ``window``, and 0 beyond. The state has a
    constant size: sums over what has left the window, and the window. Keys, values and state are
    float32 under a cast to half precision.

    Here w itself is learned, and begins at zero. The paper normalises it over the distances, with a
    learned gain and bias that also begin at zero.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads, whose channels share :math:`w`; must divide ``d_model``.
        window: Number of distances with a learned :math:`w`, including 0.

    Raises:
        InputError: If the heads do not divide the width, or ``window`` is not positive.

    References:
        Zhai et al., "An Attention Free Transformer", 2021, section 3.2.
    """

    optimizer_groups: ClassVar[Mapping[str, str]] = {"distance": "no_decay"}

    def __init__(self, d_model: int, *, n_heads: Count = 4, window: Count = 32) -> None:
        super().__init__(d_model)
        head_sizes(d_model, n_heads, None, None)
        self.n_heads, self.window = n_heads, window
        self.qkv = Linear(d_model, [d_model] * 3)
        self.distance = nn.Parameter(torch.zeros(n_heads, window))
        self.out_proj = Linear(d_model, d_model)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> AFTState:  # noqa: ARG002
        """No tokens."""
        past = zeros(self.distance, batch_size, self.window - 1, self.d_model)
        past = past.to(torch.promote_types(past.dtype, torch.float32))
        level = past.new_full((batch_size, self.d_model), _NOTHING)
        sums = past.new_zeros(batch_size, self.d_model, 2)
        return AFTState(level, sums, torch.full_like(past, _NOTHING), past)

    @override
    def forward_chunk(self, x: Tensor, state: AFTState) -> tuple[Tensor, AFTState]:
        weights = self.distance.repeat_interleave(self.d_model // self.n_heads, 0)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        y, after = _means(q, k, v, weights, state)
        return self.out_proj(y), after

    def flops_per_token(self, length: int) -> float:
        """Maps, and per channel 12 operations for each distance and 11 to join two sums."""
        joined = sum(length + 1 - 2**i for i in range(length.bit_length())) / length
        return super().flops_per_token(length) + (12.0 * self.window + 11.0 * joined) * self.d_model


@contained()
def _means(
    q: Float[Tensor, "batch length d_model"],
    k: Float[Tensor, "batch length d_model"],
    v: Float[Tensor, "batch length d_model"],
    weights: Float[Tensor, "d_model window"],
    state: AFTState,
) -> tuple[Float[Tensor, "batch length d_model"], AFTState]:
    """Gated means of the values, and the state after them."""
    keys = torch.cat([state.keys, k.to(state.keys.dtype)], dim=1)
    values = torch.cat([state.values, v.to(state.values.dtype)], dim=1)
    sums = torch.stack([values, torch.ones_like(values)], dim=-1)
    length, last = k.shape[1], state.keys.shape[1]
    # What has left the window before token t: the state and the first t of these tokens.
    left = _running(
        Weighted(
            torch.cat([state.level[:, None], keys[:, :length]], dim=1),
            torch.cat([state.sums[:, None], sums[:, :length]], dim=1),
        )
    )
    total = Weighted(left.level[:, :-1], left.sums[:, :-1])
    for distance, weight in enumerate(weights.to(keys.dtype).T):
        own = slice(last - distance, last - distance + length)
        total = total.and_also(Weighted(keys[:, own] + weight, sums[:, own]))
    value, weight = total.sums.unbind(dim=-1)
    after = (left.level[:, -1], left.sums[:, -1], keys[:, length:], values[:, length:])
    return q.sigmoid() * (value / weight).to(q.dtype), AFTState(*(part.clone() for part in after))


def _running(parts: Weighted) -> Weighted:
    """Sums up to each position, by doubling distances."""
    step, (level, sums) = 1, parts
    while step < level.shape[1]:
        earlier = Weighted(level[:, :-step], sums[:, :-step])
        later = earlier.and_also(Weighted(level[:, step:], sums[:, step:]))
        level = torch.cat([level[:, :step], later.level], dim=1)
        sums = torch.cat([sums[:, :step], later.sums], dim=1)
        step *= 2
    return Weighted(level, sums)
