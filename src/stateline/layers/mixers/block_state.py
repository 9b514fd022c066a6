"""Block-State layer: tokens attend to a sliding window and to outputs of an SSM."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import AnyLayer, SequenceLayer, zeros
from stateline.layers.linear import Linear
from stateline.layers.mixers.cross_attention import TokenSettings, attend_by_block, attend_to_all
from stateline.layers.mixers.diagonal_ssm import ChannelSSM, DiagonalSSM
from stateline.layers.mixers.dss import DSS
from stateline.layers.mixers.long_conv import ImplicitFilters
from stateline.layers.mixers.s4 import S4SSM
from stateline.layers.mixers.s5 import S5SSM
from stateline.layers.mixers.sliding_attention import SlidingAttentionState
from stateline.layers.norm import RMSNorm
from stateline.ops import LocalWindow, attention, local_attention
from stateline.settings import Choice, Count

Variant = Literal["sh", "mh", "mf"]
Lift = Literal["narrow", "full"]


class BlockStateState(NamedTuple):
    """States of the state space model and of the sliding attention; context keys and values.

    ``k`` and ``v`` belong to the context states of the last positions, the latest last (``sh`` and
    ``mh``), or to the context states that the current block sees (``mf``).
    """

    ssm: Any
    local: SlidingAttentionState
    k: Float[Tensor, "batch slot head d_head"]
    v: Float[Tensor, "batch slot head d_head"]


@dataclass(frozen=True, kw_only=True)
class _Recurrence(Choice):
    """A state space model that is computed as a recurrence.

    Attributes:
        d_state: State size per channel.
    """

    d_state: Count = 16


class UseS4D(_Recurrence):
    """S4D, with frequencies that are multiples of one number, and a zero-order hold."""

    owner = "s4d"

    def made(self, width: int, n: int) -> AnyLayer:
        """The layer, with a number of outputs per channel."""
        return DiagonalSSM(width, d_state=self.d_state, n_outputs=n, discretization="zoh")


class UseS4(_Recurrence):
    """S4."""

    owner = "s4"

    def made(self, width: int, n: int) -> AnyLayer:
        """The layer, with a number of outputs per channel."""
        return S4SSM(width, d_state=self.d_state, n_outputs=n)


class UseS5(_Recurrence):
    """S5; its state is that of all channels."""

    owner = "s5"

    def made(self, width: int, n: int) -> AnyLayer:
        """The layer, with a number of outputs per channel."""
        return S5SSM(width, d_state=self.d_state, n_outputs=n)


class UseDSS(_Recurrence):
    """DSS, with the kernel exp."""

    owner = "dss"

    def made(self, width: int, n: int) -> AnyLayer:
        """The layer, with a number of outputs per channel."""
        return DSS(width, d_state=self.d_state, n_outputs=n).ssm


@dataclass(frozen=True, kw_only=True)
class FreeFilters(Choice):
    """Free filters.

    Attributes:
        filter_len: Taps of the filters.
    """

    owner = "long_conv"
    filter_len: Count = 1024

    def made(self, width: int, n: int) -> AnyLayer:
        """The layer, with a number of outputs per channel."""
        return ImplicitFilters(width, n_filters=n, filter_len=self.filter_len)


_S4D = UseS4D()


@dataclass(frozen=True, kw_only=True)
class BlockStateSettings(TokenSettings):
    r"""Settings of :class:`~stateline.layers.BlockState`.

    It has the settings of :class:`~stateline.layers.mixers.cross_attention.TokenSettings`, too.

    Attributes:
        d_head: Width of a head; by default ``d_model / n_heads``.
        variant: Kind of context states: ``sh``, ``mh`` or ``mf``.
        ssm: State space model: :class:`UseS4D`, :class:`UseS4`, :class:`UseS5`, :class:`UseDSS` or
            :class:`FreeFilters`.
        d_ssm: Width of the state space model; by default a quarter of ``d_model``, for ``mf`` an
            eighth.
        n_states: For ``mf``: number of context states.
        independent: For ``mh`` and ``mf``: whether each output has its own state space model,
            instead of a readout of a common one; not with ``s5``. Models of ``dss`` still share
            their transition. Free filters are always independent.
        lift: ``narrow``: keys and values are computed from context states at the width of the state
            space model. ``full``: these are first mapped to ``d_model``, normalised and given their
            IDs there; not for ``mh``.
    """

    d_head: Count | None = None
    variant: Variant = "sh"
    ssm: UseS4D | UseS4 | UseS5 | UseDSS | FreeFilters = _S4D
    d_ssm: Count | None = None
    n_states: Count = 32
    independent: bool = False
    lift: Lift = "narrow"

    def __post_init__(self) -> None:
        variant, ssm, lift = self.variant, self.ssm.owner, self.lift
        if self.independent and (variant == "sh" or ssm == "s5"):
            raise InputError(
                "independent is for several outputs (mh, mf), and not for s5, whose outputs all "
                f"read one state: got {variant=} and {ssm=}"
            )
        if lift == "full" and variant == "mh":
            raise InputError(
                f"lift must be narrow, or full for sh and mf, got {lift=} and {variant=}"
            )


class BlockState(SequenceLayer[BlockStateState]):
    r"""Sliding attention plus attention to context states from a state space model.

    .. math::
        c = \mathrm{SSM}(W_n x), \qquad
        y_i = \mathrm{sliding}(x)_i + W_o \left[ \sum_s
        \mathrm{softmax}_s(\lambda\, q_i \cdot k_s)\, v_s \right]_h, \qquad
        k, v = W_{kv}\,\mathrm{norm}(c)

    where :math:`\lambda` is the learned scale of ``qk_norm``, or :math:`1 / \sqrt d` without it.

    The state space model reads the whole sequence at a fraction of the width. Which of its outputs
    a token sees depends on the token's block of ``window`` tokens:

    - ``sh`` (single head): the outputs at the tokens of its own block, up to itself;
    - ``mh`` (multi-head): the same, with a separate output for each head;
    - ``mf`` (multi-filter): ``n_states`` outputs at the last token of the previous block, with
      learned context IDs added; in the first block, a learned context.

    The state space model is the only recurrence across blocks, so all blocks are computed at once.
    The cost is linear in the length; the state has a constant size (with ``long_conv``, all inputs
    that its filters reach).

    Args:
        d_model: Width of input and output.
        **settings: See :class:`~stateline.layers.mixers.block_state.BlockStateSettings`.

    Raises:
        InputError: If a size does not fit, a name is unknown, or the outputs cannot be independent.

    References:
        Fathi et al., "Block-State Transformers", NeurIPS 2023. Tokens attend as in Hutchins
        et al., "Block-Recurrent Transformers", NeurIPS 2022, and its code.
    """

    settings: BlockStateSettings

    # Differs from the paper's pseudo-code, which shifts the context of mf along the filters, so
    # that a block would see its own last token, and which does not scale the Fourier transform.
    # The size of the paper's models suggests what ``lift=full`` does. By default, keys and values
    # come from the reduced width directly. Without IDs and with keys of unit length, both variants
    # can compute the same keys, and the same values up to a factor per context state.
    def __init__(self, d_model: int, **settings: Any) -> None:
        super().__init__(d_model, **settings)
        its = self.settings
        variant, n_heads, n_states = its.variant, its.n_heads, its.n_states
        narrow = max(1, d_model // (8 if variant == "mf" else 4))
        d_ssm = narrow if its.d_ssm is None else its.d_ssm
        self.variant, self.window, self.d_ssm = variant, its.window, d_ssm
        self.local, self.cross = its.attentions(d_model, its.d_head)
        outputs = {"sh": 1, "mh": n_heads, "mf": n_states}[variant]
        self.copies = outputs if its.independent and not isinstance(its.ssm, FreeFilters) else 1
        self.narrow = Linear(d_model, d_ssm, bias=False)
        self.ssm = its.ssm.made(self.copies * d_ssm, outputs // self.copies)
        full, heads = its.lift == "full", n_heads * self.cross.d_head
        self.w_lift = nn.Parameter(torch.randn(d_ssm, d_model) / d_ssm**0.5) if full else None
        width, readers = d_model if full else d_ssm, n_heads if variant == "mh" else 1
        self.norm = RMSNorm(width, eps=1e-6)
        self.w_kv = nn.Parameter(torch.randn(readers, width, 2 * heads // readers) / width**0.5)
        self.initial = nn.Parameter(torch.randn(n_states, d_ssm)) if variant == "mf" else None
        self.ids = nn.Parameter(torch.randn(n_states, width)) if variant == "mf" else None

    def init_state(self, batch_size: int, *, capacity: int = 0) -> BlockStateState:
        """Initial states of the parts; for ``mf``, the learned context."""
        local = self.local.init_state(batch_size, capacity=capacity)
        ssm = self.ssm.init_state(batch_size, capacity=capacity)
        if self.initial is None:
            heads = (self.cross.n_heads, self.cross.d_head)
            k = zeros(self.narrow.weight, batch_size, self.window - 1, *heads)
            return BlockStateState(ssm, local, k, k.clone())
        k, v = (t.repeat(batch_size, 1, 1, 1) for t in self.keys_and_values(self.initial[None]))
        return BlockStateState(ssm, local, k, v)

    @override
    def forward(self, x: Tensor) -> Tensor:
        if not x.shape[1]:
            return x
        k, v = (t.flatten(0, 1) for t in self.keys_and_values(self.context_states(x)))
        q = _blocks(self.cross.queries(x), self.window).flatten(0, 1)
        attend = attend_to_all if self.variant == "mf" else attention
        found = attend(q, k, v, dropout=self.cross.dropout.rate)
        heads = found.unflatten(0, (x.shape[0], -1)).flatten(1, 2)[:, : x.shape[1]]
        return self.local(x) + self.cross.merge(heads)

    def context_states(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch block state *reader d_ssm"]:
        """Context states of every block: outputs of the state space model.

        The last block is padded; ``mh`` has an axis for the heads.
        """
        if self.initial is None:
            return _blocks(self._outputs(self.ssm(self._narrowed(x))), self.window)
        past = self._narrowed(x[:, : (x.shape[1] - 1) // self.window * self.window])
        if isinstance(self.ssm, ChannelSSM):
            ends = self.ssm.every(past, self.window)
        else:
            ends = self.ssm(past)[:, self.window - 1 :: self.window]
        initial = self.initial.expand(x.shape[0], 1, -1, -1).to(ends.dtype)
        return torch.cat([initial, self._outputs(ends)], dim=1)

    @override
    def forward_chunk(self, x: Tensor, state: BlockStateState) -> tuple[Tensor, BlockStateState]:
        """Continue from a state; rows may be at different offsets in their blocks."""
        if not x.shape[1]:
            return x, state
        y, local = self.local.forward_chunk(x, state.local)
        c, ssm = self.ssm.forward_chunk(self._narrowed(x), state.ssm)
        heads, k, v = self._read(self.cross.queries(x), self._outputs(c), state)
        return y + self.cross.merge(heads), BlockStateState(ssm, local, k, v)

    @override
    def step(self, x: Tensor, state: BlockStateState) -> tuple[Tensor, BlockStateState]:
        y, local = self.local.step(x, state.local)
        c, ssm = self.ssm.step(self._narrowed(x), state.ssm)
        heads, k, v = self._read(self.cross.queries(x)[:, None], self._outputs(c)[:, None], state)
        return y + self.cross.merge(heads[:, 0]), BlockStateState(ssm, local, k, v)

    def flops_per_token(self, length: int) -> float:
        """Projections, both attentions, and the state space model."""
        flops = super().flops_per_token(length)
        seen = (min(length, self.window) + 1) / 2
        states = 1.0
        if self.ids is not None:
            seen, states = len(self.ids), len(self.ids) / self.window
        lift = 0 if self.w_lift is None else self.w_lift.numel()
        flops += 2.0 * states * (self.w_kv.numel() + lift)
        flops += 4.0 * self.cross.n_heads * self.cross.d_head * seen
        if self.ids is not None and isinstance(self.ssm, ChannelSSM):
            flops += self.ssm.flops_of_every(self.window, length)
            flops -= self.ssm.flops_per_token(length)
        return flops

    def _narrowed(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch width"]:
        """Input of the state space model, repeated for independent ones."""
        narrow = self.narrow(x)
        return narrow.repeat(*[1] * (x.ndim - 1), self.copies)

    def _outputs(self, c: Float[Tensor, "*batch outputs"]) -> Float[Tensor, "... d_ssm"]:
        """Outputs with an axis for the readouts, if there are several."""
        return c if self.variant == "sh" else c.unflatten(-1, (-1, self.d_ssm))

    def keys_and_values(self, context: Float[Tensor, "*batch d_ssm"]) -> tuple[Tensor, Tensor]:
        """Keys and values (..., state, head, d_head) of context states."""
        context = self.norm(context if self.w_lift is None else context @ self.w_lift)
        if self.ids is not None:
            context = context + self.ids
        if self.variant == "mh":
            kv = torch.einsum("...hd,hde->...he", context, self.w_kv)
            k, v = kv.chunk(2, dim=-1)
        else:
            kv = context @ self.w_kv[0]
            k, v = kv.unflatten(-1, (2, -1, self.cross.d_head)).unbind(dim=-3)
        return self.cross.keys(k), v

    def _read(
        self,
        q: Float[Tensor, "batch length head d_head"],
        c: Float[Tensor, "batch length *reader d_ssm"],
        state: BlockStateState,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output of the attention to the context states, and their keys and values to keep."""
        length, window = q.shape[1], self.window
        phase = state.local.length % window
        old, rate = (state.k, state.v), self.cross.dropout.rate
        if self.initial is None:
            new = self.keys_and_values(c)
            k, v = (torch.cat([a, b.to(a.dtype)], dim=1) for a, b in zip(old, new, strict=True))
            seen = LocalWindow(window, block_len=window, phase=phase)
            found = local_attention(q, k, v, seen, rate)
            # copies, which free the memory of the chunk
            return found, k[:, length:].clone(), v[:, length:].clone()
        # Block 0 sees the context in the state; block n sees what block n - 1 has left.
        row = torch.arange(len(q), device=q.device)[:, None]
        blocks = (length + window - 1) // window
        end = torch.arange(1, blocks + 1, device=q.device) * window - 1 - phase[:, None]
        new = self.keys_and_values(c[row, end.clamp(max=length - 1)])
        k, v = (
            torch.cat([a[:, None], b.to(a.dtype)], dim=1) for a, b in zip(old, new, strict=True)
        )
        found = attend_by_block(q, k, v, phase, window, dropout=rate)
        last = ((phase + length) // window)[:, None]
        return found, k[row, last][:, 0], v[row, last][:, 0]


def _blocks(
    x: Float[Tensor, "batch length *shape"], window: int
) -> Float[Tensor, "batch block window *shape"]:
    """Cut a sequence into blocks; the last one is padded with zeros."""
    if missing := -x.shape[1] % window:  # padding by zero would copy
        x = F.pad(x, (*[0, 0] * (x.ndim - 2), 0, missing))
    return x.unflatten(1, (-1, window))
