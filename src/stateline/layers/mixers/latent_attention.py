"""Multi-head latent attention: the cache holds one short vector per token for all heads."""

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import SequenceLayer, zeros
from stateline.layers.linear import Linear
from stateline.layers.mixers.heads import Rotary, RotatesHeads, appended, head_sizes, joined, scaled
from stateline.layers.norm import RMSNorm
from stateline.layers.plain import is_plain
from stateline.ops import AttentionMask, attention
from stateline.ops.attention import check_room
from stateline.ops.kernel_op import values_at_hand
from stateline.settings import Count, NotNegative, Positive


class LatentAttentionState(NamedTuple):
    """Latents and rotated keys so far: slot j holds position j; slots after ``length`` are free."""

    latent: Float[Tensor, "batch slot d_slot"]
    length: Int[Tensor, " batch"]

    @staticmethod
    def cat(states: Sequence["LatentAttentionState"]) -> "LatentAttentionState":
        """Join rows of different lengths; shorter rows get free slots."""
        latent, length = zip(*states, strict=True)
        return LatentAttentionState(joined(latent), torch.cat(length))

    @staticmethod
    def trim(state: "LatentAttentionState") -> "LatentAttentionState":
        """Drop the slots that no row has filled."""
        used = int(state.length.max()) if len(state.length) else 0
        return LatentAttentionState(state.latent[:, :used], state.length)


class LatentAttention(SequenceLayer[LatentAttentionState], RotatesHeads):
    r"""Multi-head causal attention with a compressed cache (MLA).

    .. math::
        c_j = \mathrm{norm}(W_c x_j), \quad (k_j, v_j) = W_u c_j, \quad r_j = R_j W_r x_j, \qquad
        y_i = W_o \left[ \sum_{j \le i} \mathrm{softmax}_j\left(
        \frac{q_i \cdot k_j + R_i q'_i \cdot r_j}{\sqrt{d_h + d_r}} \right) v_j \right]_h

    Each head has queries q and q', keys k and values v of its own; all share the latent c and the
    rotated key r, which are all that the state holds. :math:`R_i` rotates pairs of entries by
    angles proportional to the position i. ``forward`` computes keys and values. ``step``, and
    ``forward_chunk`` where it costs less, multiply the queries and the result by :math:`W_u`
    instead, and attend to the latents themselves.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads; must divide ``d_model`` unless ``d_head`` is given.
        d_head: Width of a head; by default ``d_model / n_heads``.
        d_latent: Width of the latent; by default twice ``d_head``.
        d_rotary: Width of the rotated key, even; by default half of ``d_head``, rounded up to an
            even number.
        position: Whether :math:`R_i` rotates (``rope``) or is the identity (``none``), as in
            Kimi-Linear.
        rope_base: Base of the angles: see :func:`stateline.ops.positions.rotate`.
        norm_eps: Added to the mean square in the norm of the latent.

    Raises:
        InputError: If the heads do not fit the width, a size is not positive, ``d_rotary`` is odd,
            or the position scheme is unknown.

    References:
        DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1; queries are not compressed, as in its smaller
        model.
    """

    in_full: ClassVar = ("up_proj",)
    """The map whose weight is read as a matrix at every token."""

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: Count = 4,
        d_head: Count | None = None,
        d_latent: Count | None = None,
        d_rotary: Count | None = None,
        position: Literal["rope", "none"] = "rope",
        rope_base: Positive = 10_000.0,
        norm_eps: NotNegative = 1e-6,
    ) -> None:
        super().__init__(d_model)
        _, self.d_head = head_sizes(d_model, n_heads, None, d_head)
        self.d_latent = 2 * self.d_head if d_latent is None else d_latent
        self.d_rotary = 2 * -(-self.d_head // 4) if d_rotary is None else d_rotary
        self.position = position
        if self.d_rotary % 2:
            raise InputError(f"d_rotary must be even, for pairs are rotated, got {d_rotary}")
        self.n_heads, self.rope_base, self.norm_eps = n_heads, rope_base, norm_eps
        self.rotary = Rotary(self.d_rotary, rope_base, None) if position == "rope" else None
        width = n_heads * (self.d_head + self.d_rotary)
        self.q_proj = Linear(d_model, width, bias=False, heads=n_heads)
        self.down_proj = Linear(d_model, [self.d_latent, self.d_rotary], bias=False)
        self.norm = RMSNorm(self.d_latent, eps=norm_eps)
        width = 2 * n_heads * self.d_head
        self.up_proj = Linear(self.d_latent, width, bias=False, heads=n_heads, turns=2)
        self.out_proj = Linear(n_heads * self.d_head, d_model, bias=False)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> LatentAttentionState:
        """Empty cache with ``capacity`` free slots."""
        width = self.d_latent + self.d_rotary
        free = zeros(self.q_proj.weight, batch_size, capacity, width)
        length = torch.zeros(batch_size, dtype=torch.int64, device=free.device)
        return LatentAttentionState(free, length)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, slots = self._project(x, torch.arange(x.shape[1], device=x.device)[None])
        return self._attend_to_keys(q, slots)

    @override
    def forward_chunk(
        self, x: Tensor, state: LatentAttentionState
    ) -> tuple[Tensor, LatentAttentionState]:
        length = x.shape[1]
        positions = state.length[:, None] + torch.arange(length, device=x.device)
        q, new = self._project(x, positions)
        slots = appended(state.latent, new, state.length)
        after = LatentAttentionState(slots, state.length + length)
        # Keys cost d_latent * d_head products for each slot, latents the same for each query. With
        # latents, each pair of query and slot needs d_latent - d_head more products, which take
        # about twice as long.
        held = _held(slots, after.length)
        n_slots, d, wider = held.shape[1], self.d_head, self.d_latent - self.d_head
        many = (n_slots - length) * self.d_latent * d < 2 * length * n_slots * wider
        attend = self._attend_to_keys if many else self._attend_to_few
        return attend(q, held, state.length), after

    @override
    def step_(self, x: Tensor, state: LatentAttentionState) -> Tensor:
        slot = state.length[:, None]
        check_room(state.length, state.latent.shape[1])
        q, new = self._project(x[:, None], slot)
        state.latent.scatter_(1, slot[..., None].expand_as(new), new.to(state.latent.dtype))
        y = self._attend_to_few(q, _held(state.latent, slot + 1), state.length)
        state.length.add_(1)
        return y[:, 0]

    def flops_per_token(self, length: int) -> float:
        """Linear maps, and scores and weighted sums over (length + 1) / 2 keys on average."""
        mixing = self.n_heads * (2.0 * self.d_head + self.d_rotary) * (length + 1)
        return super().flops_per_token(length) + mixing

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (batch, length, head, d_head + d_rotary) and what slots hold of the tokens."""
        q = self.q_proj(x).unflatten(-1, (self.n_heads, self.d_head + self.d_rotary))
        plain, turned = q.split([self.d_head, self.d_rotary], dim=-1)
        latent, key = self.down_proj(x).split([self.d_latent, self.d_rotary], dim=-1)
        turned, key = self.rotated(positions, turned, key[:, :, None])
        slots = torch.cat([self.norm(latent), key[:, :, 0]], dim=-1)
        return torch.cat([plain, turned], dim=-1), slots

    def _attend_to_keys(self, q: Tensor, slots: Tensor, start: Tensor | None = None) -> Tensor:
        """Attend to the keys and values of all heads, made from the latents."""
        latent, rotated = slots.to(q.dtype).split([self.d_latent, self.d_rotary], dim=-1)
        joint = self.up_proj(latent).unflatten(-1, (self.n_heads, 2 * self.d_head))
        k, v = joint.chunk(2, dim=-1)
        k = torch.cat([k, rotated[:, :, None].expand(-1, -1, self.n_heads, -1)], dim=-1)
        y = attention(q, k, F.pad(v, (0, self.d_rotary)), AttentionMask(start))
        return self.out_proj(y[..., : self.d_head].flatten(2))

    def _attend_to_few(self, q: Tensor, slots: Tensor, start: Tensor) -> Tensor:
        """Attend to the latents; to keys and values if ``up_proj`` is more than its weight."""
        attend = self._attend_to_latents if is_plain(self.up_proj) else self._attend_to_keys
        return attend(q, slots, start)

    def _attend_to_latents(self, q: Tensor, slots: Tensor, start: Tensor) -> Tensor:
        """Attend to the latents, as keys and as values that all heads share."""
        up = self.up_proj.weight.view(self.n_heads, 2, self.d_head, self.d_latent)
        plain, turned = q.split([self.d_head, self.d_rotary], dim=-1)
        plain = torch.einsum("bthd,hdc->bthc", plain, up[:, 0].to(q.dtype))
        q = scaled(torch.cat([plain, turned], dim=-1), (self.d_head + self.d_rotary) ** -0.5)
        shared = slots[:, :, None]
        found = attention(q, shared, shared, AttentionMask(start))[..., : self.d_latent]
        y = torch.einsum("bthc,hdc->bthd", found, up[:, 1].to(found.dtype))
        return self.out_proj(y.flatten(2))


def _held(slots: Tensor, length: Tensor) -> Tensor:
    """The slots up to the longest row, if reading its length costs no synchronisation."""
    return slots[:, : int(length.max())] if len(length) and values_at_hand(length) else slots
