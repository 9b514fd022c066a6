"""Mamba-3: a selective state space model that rotates its state and joins adjacent inputs."""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import SequenceLayer, accumulates, zeros
from stateline.layers.documents import Documents
from stateline.layers.linear import Linear
from stateline.layers.mixers.mamba2 import head_width
from stateline.layers.mixers.step_sizes import initial_step_bias
from stateline.ops import LinearSignals, linear_attention
from stateline.ops.containment import contained, known_finite
from stateline.ops.linear_attention import CHUNK
from stateline.settings import Count, Factor, NotNegative


@accumulates("h", "angle")
class Mamba3State(NamedTuple):
    """Matrix and angles of every head, and the latest key and value, which the next token joins."""

    h: Float[Tensor, "batch head d_state d_head"]
    angle: Float[Tensor, "batch head pair"]
    key: Float[Tensor, "batch head rank d_state"]
    value: Float[Tensor, "batch head d_head"]


class Mamba3(SequenceLayer[Mamba3State]):
    r"""Selective state space layer with complex states, the trapezoidal rule and several inputs.

    .. math::
        (z, u, B, C, \delta, a, \mu, \omega) = W_{\mathrm{in}} x, \quad
        \Delta = \mathrm{softplus}(\delta + b_\Delta), \quad
        \alpha = e^{-\Delta g(a)}, \quad \lambda = \sigma(\mu)

    .. math::
        \phi_t = \phi_{t-1} + \pi \Delta_t \tanh(\omega_t), \quad
        k_t = R(\phi_t)(\mathrm{norm}(B_t) + b_B), \quad q_t = R(\phi_t)(\mathrm{norm}(C_t) + b_C)

    .. math::
        S_t = \alpha_t S_{t-1} + (1 - \lambda_t) \Delta_t \alpha_t k_{t-1} u_{t-1}^\top +
        \lambda_t \Delta_t k_t u_t^\top, \qquad
        y = W_{\mathrm{out}} \bigl( (S_t^\top q_t + D u_t) \odot \mathrm{silu}(z_t) \bigr)

    in each head. R rotates pairs of entries by the angles :math:`\phi`, which all tokens so far
    turned: this is a diagonal state space model with complex states. The sum of two inputs is the
    trapezoidal rule; with the biases of B and C it takes the place of the short convolution.
    :math:`g(a) = 1 + a` for :math:`a \ge 0`, else :math:`1 / (1 - a)`.

    A token has ``mimo_rank`` keys and queries. Key r writes the values scaled by weights
    :math:`u_t \odot w_r`, and query r reads separately: its gate and its output are scaled in the
    same way, and the outputs are added. The state keeps its size.

    The parameters other than linear maps and the state stay float32 under a cast to half precision.

    Args:
        d_model: Width of input and output.
        d_state: Rows of each head's state: the length of B and C; even.
        expand: Number of inner channels, as a multiple of ``d_model``.
        d_head: Inner channels of a head; by default the largest number up to 64 that divides them.
        n_groups: Groups of heads that share B and C; must divide the number of heads.
        mimo_rank: Keys and queries of a token.
        rope_fraction: Part of the entries of B and C that are rotated, from 0 to 1.
        pairs: Which entries are rotated together: ``adjacent`` ones, or those at the same place in
            both ``halves``. Official code uses ``adjacent`` at rank 1, and ``halves`` above.
        out_norm: Whether the output of a head is divided by its root mean square before the gate.
        decay_floor: Smallest :math:`g(a)`.
        norm_eps: Added to the mean square in the norms.

    Raises:
        InputError: If a size is not positive, or one does not divide the other.

    References:
        Lahoti et al., "Mamba-3: Improved Sequence Modeling using State Space Principles", ICLR
        2026, sections 3 and 4; g, tanh and initial values as in the official code.
    """

    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("dt_bias", "skip", "b_bias", "c_bias", "norm_weight"), "no_decay"
    )

    def __init__(  # noqa: PLR0913
        self,
        d_model: int,
        *,
        d_state: int = 128,
        expand: Factor = 2.0,
        d_head: Count | None = None,
        n_groups: Count = 1,
        mimo_rank: Count = 1,
        rope_fraction: NotNegative = 0.5,
        pairs: Literal["adjacent", "halves"] = "adjacent",
        out_norm: bool = False,
        decay_floor: NotNegative = 1e-4,
        norm_eps: NotNegative = 1e-5,
    ) -> None:
        super().__init__(d_model)
        self.expand, self.d_inner = expand, int(expand * d_model)
        self.rope_fraction, self.pairs, self.mimo_rank = rope_fraction, pairs, mimo_rank
        self.decay_floor, self.norm_eps, self.out_norm = decay_floor, norm_eps, out_norm
        if d_state < 2 or d_state % 2:
            raise InputError(f"d_state must be a positive even number, got {d_state=}")
        if rope_fraction > 1:
            raise InputError(f"rope_fraction must be from 0 to 1, got {rope_fraction=}")
        d_head = head_width(self.d_inner, d_head, n_groups)
        self.d_state, self.d_head, self.n_groups = d_state, d_head, n_groups
        self.n_heads, self.n_angles = self.d_inner // d_head, int(d_state * rope_fraction) // 2
        vectors = mimo_rank * n_groups * d_state
        self.sizes = [self.d_inner] * 2 + [vectors] * 2 + [self.n_heads] * 3 + [self.n_angles]
        self.in_proj = Linear(d_model, self.sizes, bias=False)
        self.dt_bias = nn.Parameter(initial_step_bias(self.n_heads))
        self.b_weight, self.c_weight = (nn.Parameter(torch.ones(d_state)) for _ in "bc")
        each = self.n_heads, mimo_rank
        self.b_bias, self.c_bias = (nn.Parameter(torch.ones(*each, d_state)) for _ in "bc")
        self.skip = nn.Parameter(torch.ones(self.n_heads))
        self.mimo_in, self.mimo_gate, self.mimo_out = (
            nn.Parameter(torch.full((*each, d_head), value)) if mimo_rank > 1 else None
            for value in (1 / mimo_rank, 1.0, 1 / mimo_rank)
        )
        self.norm_weight = nn.Parameter(torch.ones(self.n_heads, d_head)) if out_norm else None
        self.out_proj = Linear(self.d_inner, d_model, bias=False)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Mamba3State:  # noqa: ARG002
        """Zero states."""
        each = batch_size, self.n_heads
        return Mamba3State(
            zeros(self.skip, *each, self.d_state, self.d_head),
            zeros(self.skip, *each, self.n_angles),
            zeros(self.skip, *each, self.mimo_rank, self.d_state),
            zeros(self.skip, *each, self.d_head),
        )

    @override
    def forward_chunk(
        self, x: Tensor, state: Mamba3State, starts: Documents | None = None
    ) -> tuple[Tensor, Mamba3State]:
        # A token adds its key and value twice: at once, and with weight (1 - lambda) Delta at the
        # next token. One linear attention writes both parts at once, so its output has the second
        # part too early, and query r misses keys r + 1, ... of its token: ``inside`` corrects both.
        length, each = x.shape[1], None
        z, u, b, c, log_decay, now, before, turn = self._signals(x, state)
        if starts is not None:
            before = before.masked_fill(starts.mask[..., None], 0.0)
            each = F.pad(starts.mask[..., None], (0, self.mimo_rank - 1)).flatten(1)
        after = _of_next(before)
        angle = _wrapped(_angles(turn.double(), state.angle, starts))
        k, q = self._rotated(angle.to(u.dtype), b, c)
        v = _spread(u, self.mimo_in)
        pending = state.key.to(u.dtype).mT @ _spread(state.value.to(u.dtype), self.mimo_in)
        h = state.h + before[:, :1].sum(dim=1)[..., None, None] * pending
        signals = LinearSignals(
            self._in_turn(q),
            self._in_turn(k * (now + after)[..., None, None]),
            self._in_turn(v),
            F.pad(log_decay[:, :, None], (0, 0, 0, self.mimo_rank - 1)).flatten(1, 2),
        )
        y, h = linear_attention(signals, h.to(state.h.dtype), starts=each)
        y = y.unflatten(1, (length, self.mimo_rank)).transpose(2, 3)
        late = torch.ones(2 * (self.mimo_rank,), dtype=torch.bool, device=x.device).triu(1)
        inside = torch.where(late, now[..., None, None], -after[..., None, None]) * (q @ k.mT)
        y = self._read(y + inside @ v, v, z)
        # Copies, so that the state does not keep the whole chunk in memory.
        latest = (t[:, -1].clone() for t in (angle.to(u.dtype), k, u) if length)
        return y, Mamba3State(h, *latest) if length else state

    @override
    def step(self, x: Tensor, state: Mamba3State) -> tuple[Tensor, Mamba3State]:
        z, u, b, c, log_decay, now, before, turn = self._signals(x, state)
        angle = _wrapped(state.angle + turn.double()).to(u.dtype)
        k, q = self._rotated(angle, b, c)
        kept, before, now = (t[..., None, None] for t in (log_decay.exp(), before, now))
        v = _spread(u, self.mimo_in)
        keys = torch.cat((kept * before * state.key.to(u.dtype), now * k), dim=-2)
        values = torch.cat((_spread(state.value.to(u.dtype), self.mimo_in), v), dim=-2)
        h = kept * state.h + keys.mT @ values
        return self._read(q @ h, v, z), Mamba3State(h.to(state.h.dtype), angle, k, u)

    def flops_per_token(self, length: int) -> float:
        """Projections, products with the state, and attention inside a chunk."""
        keys, rank = self.n_heads * self.d_state, self.mimo_rank
        inside = 2.0 * (min(length * rank, CHUNK) + rank) * (keys + self.d_inner)
        between = 4.0 * self.d_state * self.d_inner
        return super().flops_per_token(length) + rank * (inside + between)

    def _signals(self, x: Tensor, state: Mamba3State) -> tuple[Tensor, ...]:
        """Gate, inputs (..., head, d_head), B, C, decays, both weights, and turns of the angles."""
        wide = torch.promote_types(state.h.dtype, self.skip.dtype)
        wide = torch.promote_types(wide, torch.float32)
        z, *signals = self.in_proj(x).split(self.sizes, dim=-1)
        u, b, c, dt, a, part, turn = (t.to(wide) for t in signals)
        dt = F.softplus(dt + self.dt_bias)
        rate = a.clamp(min=0) + 1 / (1 - a.clamp(max=0))
        now = torch.sigmoid(part) * dt
        turn = math.pi * torch.tanh(turn)[..., None, :] * dt[..., None]
        u = u.unflatten(-1, (self.n_heads, self.d_head))
        b = self._vectors(b, self.b_weight, self.b_bias)
        c = self._vectors(c, self.c_weight, self.c_bias)
        return z, u, b, c, -rate.clamp(min=self.decay_floor) * dt, now, dt - now, turn

    def _vectors(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """B or C of all heads (..., head, rank, d_state), normalised."""
        x = x.unflatten(-1, (self.mimo_rank, self.n_groups, self.d_state))
        x = F.rms_norm(x, weight.shape, weight.to(x.dtype), self.norm_eps)
        each = bias.unflatten(0, (self.n_groups, -1))
        return (x.transpose(-3, -2).unsqueeze(-3) + each).flatten(-4, -3)

    def _rotated(self, angle: Tensor, *vectors: Tensor) -> list[Tensor]:
        """The vectors with all pairs rotated by the angles (..., head, pair)."""
        angle = F.pad(angle, (0, self.d_state // 2 - self.n_angles))[..., None, :]
        cos, sin = angle.cos(), angle.sin()
        axis, sizes = (-1, (-1, 2)) if self.pairs == "adjacent" else (-2, (2, -1))
        pairs = [x.unflatten(-1, sizes).unbind(axis) for x in vectors]
        return [
            torch.stack((a * cos - b * sin, a * sin + b * cos), dim=axis).flatten(-2)
            for a, b in pairs
        ]

    def _in_turn(self, x: Tensor) -> Tensor:
        """The keys, queries or values of a token one after the other (batch, time, head, entry)."""
        return x.transpose(2, 3).flatten(1, 2)

    def _read(self, y: Tensor, v: Tensor, z: Tensor) -> Tensor:
        """Output of the layer, from outputs and values (..., head, rank, d_head) and the gate."""
        y = y + self.skip[:, None, None] * v
        if self.norm_weight is not None:
            y = F.rms_norm(y, y.shape[-1:], eps=self.norm_eps) * self.norm_weight[:, None]
        gate = z.to(y.dtype).unflatten(-1, (self.n_heads, self.d_head))
        y = y * F.silu(_spread(gate, self.mimo_gate))
        y = y if self.mimo_out is None else y * self.mimo_out
        return self.out_proj(y.sum(dim=-2).flatten(-2).to(z.dtype))


def _wrapped(angle: Tensor) -> Tensor:
    """The angle from 0 to 2 pi."""
    return angle.remainder(2 * math.pi)


def _spread(x: Tensor, weight: Tensor | None) -> Tensor:
    """Channels of a head, scaled for each key or query of a token (..., head, rank, d_head)."""
    return x[..., None, :] if weight is None else x[..., None, :] * weight


def _of_next(before: Tensor) -> Tensor:
    """What the next token adds to a token, whose own output does not depend on it.

    Neither a number that is not finite nor such a gradient crosses from one to the other: the next
    token is spoilt by its own weight.
    """
    after = F.pad(_finite(before), (0, 0, 0, 1))[:, 1:]
    if after.requires_grad and not torch.compiler.is_compiling():
        after.register_hook(_finite)
    return after


def _finite(x: Tensor) -> Tensor:
    """Zeros in the place of what is not finite."""
    return x if known_finite(x) else x.where(x.isfinite(), 0.0)


@contained()
def _angles(
    turn: Float[Tensor, "batch length head angle"],
    state: Float[Tensor, "batch head angle"],
    starts: Documents | None,
) -> Float[Tensor, "batch length head angle"]:
    """Sums of the turns since the document began."""
    turned = turn.cumsum(dim=1)
    if starts is None:
        return state[:, None] + turned
    first = torch.arange(turn.shape[1], device=turn.device) - starts.positions
    first = first[..., None, None].expand_as(turned)
    before = torch.where(starts.continued[..., None, None], state[:, None], 0.0)
    return turned - (turned - turn).gather(1, first) + before
