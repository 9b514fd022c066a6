"""RWKV-7: a delta rule whose removal, writing and decay have rates of their own for each entry."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.layers.base import SequenceLayer, accumulates, records, zeros
from stateline.layers.documents import Documents, mask_of
from stateline.layers.linear import Linear
from stateline.layers.mixers.channel_mixing import shifted
from stateline.layers.mixers.heads import HeadMaps, TakesHeads, check_normalised, head_sizes
from stateline.layers.stored_state import widened
from stateline.ops import DeltaSignals, delta_rule, delta_rule_step, delta_rule_step_
from stateline.ops.delta_rule import CHUNK
from stateline.settings import Count

SLOWEST = -math.exp(-0.5)
"""Lowest logarithm of a decay."""

MIXED = ("r", "w", "k", "v", "a", "g")
"""Signals, each computed from its own mixture of the token and the previous token."""


Values = Callable[[Tensor, Tensor], Tensor]
"""Function of the input of the values and of the layer's values; it returns the values to use."""


@accumulates("s")
class RWKV7State(NamedTuple):
    """The last input, and the matrix of every head."""

    x: Float[Tensor, "batch d_model"]
    s: Float[Tensor, "batch head d_head d_head"]


class RWKV7(SequenceLayer[RWKV7State], TakesHeads):
    r"""Time mixing of RWKV-7 (Goose).

    .. math::
        S_t = \bigl( \mathrm{diag}(w_t) - (a_t \odot \kappa_t) \kappa_t^\top \bigr) S_{t-1}
        + k_t v_t^\top, \qquad
        p_t = \mathrm{norm}(S_t^\top r_t) + (r_t \odot \rho)^\top k_t \; v_t, \qquad
        y = W_o ([p_t]_h \odot g_t)

    Each of r, w, k, v, a and g is computed from a mixture of the token and the one before,
    :math:`x_t + \mu \odot (x_{t-1} - x_t)`, with weights :math:`\mu` of its own. With low-rank maps
    f, the decay is :math:`w = \exp(-e^{-1/2} \sigma(f_w))` with tanh inside, the rate of learning
    :math:`a = \sigma(f_a)`, and the gate :math:`g = f_g` with a sigmoid inside. :math:`\kappa` is
    :math:`\xi \odot k'` at unit length, with :math:`k' = W_k x`, and
    :math:`k = k' \odot (1 + (a - 1) \odot \eta)`. The norm acts on each head; it subtracts the mean
    and has weight and bias. Parameters of single entries and the state stay float32 under a cast to
    half precision.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads; must divide ``d_model`` unless ``d_head`` is given.
        d_head: Width of a head; by default ``d_model / n_heads``.
        rank: Rank of the maps to w and a.
        gate_rank: Rank of the map to the gate; by default twice ``rank``.

    Raises:
        InputError: If ``n_heads`` does not divide ``d_model``, a head has a single number, or a
            rank is not positive.

    References:
        Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025, section 4 and
        appendix; the state is the transpose of the paper's. Initial values are simpler than in
        official code, where they depend on the depth of the layer, and where ``out_proj`` begins
        at zero.
    """

    # Values are mixed with those of the first layer by the wrapper ``value_residual``; the
    # feed-forward of RWKV-7 is the layer ``channel_mixing``.

    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("mix", "decay_bias", "rate_bias", "removal", "writing", "bonus"), "no_decay"
    )

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: Count = 4,
        d_head: Count | None = None,
        rank: Count = 32,
        gate_rank: Count | None = None,
    ) -> None:
        super().__init__(d_model)
        _, self.d_head = head_sizes(d_model, n_heads, None, d_head)
        check_normalised(d_model, n_heads, self.d_head)
        self.n_heads, self.rank, inner = n_heads, rank, n_heads * self.d_head
        self.gate_rank = 2 * rank if gate_rank is None else gate_rank
        self.mix = nn.Parameter(1 - torch.linspace(0, 1, d_model).repeat(len(MIXED), 1) ** 0.5)
        self.r_proj, self.k_proj, self.v_proj = (
            Linear(d_model, inner, bias=False) for _ in range(3)
        )
        self.out_proj = Linear(inner, d_model, bias=False)
        self.decay_in, self.rate_in = (Linear(d_model, rank, bias=False) for _ in range(2))
        self.decay_out, self.rate_out = (Linear(rank, inner, bias=False) for _ in range(2))
        self.gate_in = Linear(d_model, self.gate_rank, bias=False)
        self.gate_out = Linear(self.gate_rank, inner, bias=False)
        self.decay_bias = nn.Parameter(-5.5 + 6 * torch.linspace(0, 1, inner))
        self.rate_bias = nn.Parameter(torch.zeros(inner))
        self.removal = nn.Parameter(torch.full((inner,), 0.71))
        self.writing = nn.Parameter(torch.ones(inner))
        self.bonus = nn.Parameter(torch.zeros(n_heads, self.d_head))
        self.norm = nn.GroupNorm(n_heads, inner, eps=1e-5 * self.d_head)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> RWKV7State:  # noqa: ARG002
        """Zeros."""
        s = zeros(self.mix, batch_size, self.n_heads, self.d_head, self.d_head)
        return RWKV7State(zeros(self.r_proj.weight, batch_size, self.d_model), s)

    @override
    def forward_chunk(
        self,
        x: Tensor,
        state: RWKV7State,
        starts: Documents | None = None,
        *,
        values: Values | None = None,
    ) -> tuple[Tensor, RWKV7State]:
        before, last = shifted(x, state.x, mask_of(starts))
        scan = partial(delta_rule, starts=mask_of(starts))
        y, s = self._advance(x, before, state.s, scan, values)
        return y, RWKV7State(last, s)

    @override
    def step(
        self, x: Tensor, state: RWKV7State, *, values: Values | None = None
    ) -> tuple[Tensor, RWKV7State]:
        y, s = self._advance(x, state.x, state.s, delta_rule_step, values)
        return y, RWKV7State(x.clone(), s)

    @override
    def step_(self, x: Tensor, state: RWKV7State, *, values: Values | None = None) -> Tensor:
        if not self.decodes and records(x):
            y, after = self.step(x, widened(state), values=values)
            state.s.copy_(after.s)
        else:
            y, _ = self._advance(x, state.x, state.s, _in_place, values)
        state.x.copy_(x)
        return y

    @torch.no_grad()
    def take(self, maps: HeadMaps) -> bool:
        """The maps to r, k and v."""
        shape = (self.n_heads, self.d_head, self.d_model)
        if any(each.shape != shape for each in maps):
            return False
        for own, each in zip((self.r_proj, self.k_proj, self.v_proj), maps, strict=True):
            own.weight.copy_(each.flatten(0, 1))
        return True

    def flops_per_token(self, length: int) -> float:
        """Linear maps, products with the state, and the system of a chunk."""
        inner = self.n_heads * self.d_head
        inside = min(length, CHUNK) * 15.0 * inner
        return super().flops_per_token(length) + inside + 8.0 * self.d_head * inner

    def _advance(
        self, x: Tensor, before: Tensor, s: Tensor, scan: Callable[..., Any], values: Values | None
    ) -> tuple[Tensor, Any]:
        """Outputs and the matrices after, from inputs and the inputs one token before."""
        mixed = x[..., None, :] + self.mix.to(x.dtype) * (before.to(x.dtype) - x)[..., None, :]
        x_r, x_w, x_k, x_v, x_a, x_g = mixed.unbind(dim=-2)
        low = self.decay_out(self.decay_in(x_w).tanh())
        log_decay = SLOWEST * (low + self.decay_bias).sigmoid()
        rate = (self.rate_out(self.rate_in(x_a)) + self.rate_bias).sigmoid()
        key = self.k_proj(x_k)
        removed = self._heads(self.removal * key)
        removed = F.normalize(removed, dim=-1, eps=1e-12)
        r, k, v = self.r_proj(x_r), key * (1 + (rate - 1) * self.writing), self.v_proj(x_v)
        v = v if values is None else values(x_v, v)
        r, k, v, log_decay, rate = map(self._heads, (r, k, v, log_decay, rate))
        y, after = scan(DeltaSignals(r, k, v, log_decay, removed, -rate * removed), s)
        normed = self.norm(y.to(self.norm.weight.dtype).flatten(0, -3).flatten(1))
        bonus = (r * self.bonus * k).sum(dim=-1, keepdim=True) * v
        gate = self.gate_out(self.gate_in(x_g).sigmoid())
        bonus = bonus.flatten(-2)
        found = normed.view(bonus.shape) + bonus
        return self.out_proj((found * gate).to(x.dtype)), after

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, self.d_head))


def _in_place(x: DeltaSignals, s: Tensor) -> tuple[Tensor, None]:
    return delta_rule_step_(x, s), None
