"""Channel mixing of RWKV-7: a feed-forward that also reads the token before."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.layers.base import SequenceLayer, zeros
from stateline.layers.documents import Documents, mask_of
from stateline.layers.linear import Linear
from stateline.ops.containment import Reach, Values, contained, reach
from stateline.settings import Count


def shifted(x: Tensor, before: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """The token before each token, zero where a document begins; and a copy of the last token."""
    last = x[:, -1] if x.shape[1] else before.to(x.dtype)
    return _earlier(x, before, starts), last.clone()


def _with_own(values: Values, shape: Sequence[int], before: int) -> Reach:
    """A token's own input counts, too: with it, the token before enters the output."""
    first, last = reach(values, shape, before)
    return Reach(first.maximum(last - 1), last)


@contained(_with_own)
def _earlier(
    x: Float[Tensor, "batch length d_model"],
    state: Float[Tensor, "batch d_model"],
    starts: Bool[Tensor, "batch length"] | None,
) -> Float[Tensor, "batch length d_model"]:
    earlier = torch.cat([state[:, None].to(x.dtype), x[:, :-1]], dim=1)[:, : x.shape[1]]
    return earlier if starts is None else earlier.masked_fill(starts[..., None], 0.0)


class ChannelMixingState(NamedTuple):
    """The last input."""

    x: Float[Tensor, "batch d_model"]


class ChannelMixing(SequenceLayer[ChannelMixingState]):
    r"""Channel mixing of RWKV-7.

    .. math:: y_t = W_v\, \mathrm{relu}\bigl(W_k (x_t + \mu \odot (x_{t-1} - x_t))\bigr)^2

    It takes the place of the feed-forward in a block of RWKV-7, and has no feed-forward of its own:
    ``(rwkv7 channel_mixing)*12`` with ``feed_forward="none"``. :math:`\mu` stays float32 under a
    cast to half precision.

    Args:
        d_model: Width of input and output.
        d_hidden: Hidden width; by default 4 ``d_model``.

    Raises:
        InputError: If the width is not positive.

    References:
        Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025, section 4.
        Initial values are simpler than in official code, where :math:`\mu` depends on the depth of
        the layer, and where ``out_proj`` begins at zero.
    """

    wants_feed_forward = False
    is_feed_forward = True
    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = {"mix": "no_decay"}

    def __init__(self, d_model: int, *, d_hidden: Count | None = None) -> None:
        super().__init__(d_model)
        self.d_hidden = 4 * d_model if d_hidden is None else d_hidden
        self.mix = nn.Parameter(1 - torch.linspace(0, 1, d_model))
        self.in_proj = Linear(d_model, self.d_hidden, bias=False)
        self.out_proj = Linear(self.d_hidden, d_model, bias=False)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> ChannelMixingState:  # noqa: ARG002
        """Zeros."""
        return ChannelMixingState(zeros(self.in_proj.weight, batch_size, self.d_model))

    @override
    def forward_chunk(
        self, x: Tensor, state: ChannelMixingState, starts: Documents | None = None
    ) -> tuple[Tensor, ChannelMixingState]:
        before, last = shifted(x, state.x, mask_of(starts))
        return self._mixed(x, before), ChannelMixingState(last)

    @override
    def step(self, x: Tensor, state: ChannelMixingState) -> tuple[Tensor, ChannelMixingState]:
        return self._mixed(x, state.x), ChannelMixingState(x.clone())

    @override
    def step_(self, x: Tensor, state: ChannelMixingState) -> Tensor:
        y = self._mixed(x, state.x)
        state.x.copy_(x)
        return y

    def _mixed(self, x: Tensor, before: Tensor) -> Tensor:
        mixed = x + self.mix.to(x.dtype) * (before.to(x.dtype) - x)
        return self.out_proj(F.relu(self.in_proj(mixed)).square())
