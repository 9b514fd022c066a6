"""Feedback Transformer: every layer sees a mixture of all layers at earlier positions."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import AnyLayer, SequenceLayer, zeros
from stateline.layers.compose import ActivationCheckpointing
from stateline.layers.context import Context, mean_visible
from stateline.layers.mixers.sliding_attention import SlidingAttention
from stateline.layers.wrappers.context_links import context_links
from stateline.settings import Count

CHECKPOINTED = 16
"""Tokens per checkpoint under activation checkpointing."""


class FeedbackState(NamedTuple):
    """Number of tokens of each row, and keys and values of the last memories."""

    length: Int[Tensor, " batch"]
    memory: tuple[Context, ...]


class Feedback(ActivationCheckpointing, SequenceLayer[FeedbackState]):
    r"""Attention to memories: mixtures of the outputs of all layers at earlier positions.

    With :math:`h_t^0 = x_t` and the layers' outputs :math:`h_t^1, \ldots, h_t^L`,

    .. math::
        m_t = \sum_{l=0}^{L} \mathrm{softmax}(w)_l\, h_t^l, \qquad
        h_t^l = f_l\!\left(h_t^{l-1};\; m_{t-A}, \ldots, m_{t-1}\right)

    A layer is an attention of the core with everything up to the next attention. It does not attend
    to its own position. A memory is projected to keys and values once per layer.

    Cost: T sequential steps, also in training. The state has a constant size: keys and values of
    A = ``window`` memories, per layer or shared.

    Args:
        core: Attention and feed-forwards.
        window: Number of memories that a position sees.
        shared: Whether all layers use the keys and values of the first one; the others then have no
            projections for them. The core's attention must be ``sliding_attention``, which has a
            separate projection for keys and values.

    Raises:
        InputError: If the core has layers that cannot attend to memories, its window is empty, or
            the projections cannot be shared.

    References:
        Fan et al., "Addressing Some Limitations of Transformers with Feedback Memory", 2020.
    """

    # Differs from the official code, which with shared projections also shares the norms of the
    # attentions, and which normalises memories a second time between segments.

    def __init__(self, core: AnyLayer, *, window: Count = 128, shared: bool = False) -> None:
        super().__init__(core.d_model)
        self.core, self.window, self.shared = core, window, shared
        self._links = context_links("feedback", core)
        links = [link for link in self._links if link.attends]
        self._projecting = links[: 1 if shared else None]
        heads = set[tuple[int, int]]()
        for link in links:
            if isinstance(link.layer, SlidingAttention):
                heads.add((link.layer.n_kv_heads, link.layer.d_head))
                if link.layer.window == 1 and link.layer.includes_self:
                    raise InputError(
                        "a window of 1 that includes itself contains no memory: use a larger window"
                    )
            elif shared:
                raise InputError(
                    "shared=true needs sliding_attention, whose keys and values have a separate "
                    f"projection, got {type(link.layer).__name__}"
                )
        if shared and len(heads) > 1:
            raise InputError(
                "shared=true needs layers with the same number and size of key heads, got "
                f"{sorted(heads)}: give all layers the same n_heads, n_kv_heads and d_head"
            )
        for link in links[1:] if shared else ():
            if link.layer is not links[0].layer:
                link.layer.kv_proj = nn.Identity()  # without parameters, and never called
        self.mixture = nn.Parameter(torch.zeros(len(links) + 1))

    def init_state(self, batch_size: int, *, capacity: int = 0) -> FeedbackState:  # noqa: ARG002
        """No memories."""
        x = zeros(self.mixture, batch_size, 0, self.d_model)
        length = torch.zeros(batch_size, dtype=torch.int64, device=x.device)
        memory = self.project(x, length[:, None].expand(-1, 0))
        return FeedbackState(length, tuple(its.with_slots(self.window) for its in memory))

    @override
    def forward_chunk(self, x: Tensor, state: FeedbackState) -> tuple[Tensor, FeedbackState]:
        """Process one token after the other."""
        if not x.shape[1]:
            return x, state
        outputs = []
        for chunk in x.split(CHECKPOINTED, dim=1):
            y, state = self.run(self._steps, chunk, state)
            outputs.append(y)
        return torch.cat(outputs, dim=1), state

    @override
    def step(self, x: Tensor, state: FeedbackState) -> tuple[Tensor, FeedbackState]:
        """Apply the layers to a token and add its memory."""
        positions = state.length[:, None]
        h = x[:, None]
        levels, given = [], iter(state.memory)
        for link in self._links:
            if not link.attends:
                h = link.link(h)
                continue
            levels.append(h)
            context = state.memory[0] if self.shared else next(given)
            h, _ = link.attend(h, positions, context, state.length, to_itself=False)
        levels.append(h)
        mixed = torch.einsum("l,lbtd->btd", self.mixture.softmax(dim=0), torch.stack(levels))
        made = self.project(mixed, positions)
        memory = tuple(
            old.then(new).with_slots(self.window)
            for old, new in zip(state.memory, made, strict=True)
        )
        return h[:, 0], FeedbackState(state.length + 1, memory)

    def _steps(self, x: Tensor, state: FeedbackState) -> tuple[Tensor, FeedbackState]:
        outputs = []
        for x_t in x.unbind(dim=1):
            y_t, state = self.step(x_t, state)
            outputs.append(y_t)
        return torch.stack(outputs, dim=1), state

    def project(
        self, memories: Float[Tensor, "batch length d_model"], positions: Int[Tensor, "batch _"]
    ) -> tuple[Context, ...]:
        """Keys and values of memories, per layer or shared."""
        return tuple(link.project(memories, positions) for link in self._projecting)

    def flops_per_token(self, length: int) -> float:
        """Operations of the core on the memories, of the mixture, and of projecting the memory.

        :class:`SlidingAttention` projects the keys and values of memories only, not of its input;
        :class:`~stateline.layers.Attention` computes the projection of both.
        """
        flops = 2.0 * self.d_model * len(self.mixture)
        for link in self._links:
            flops += link.attend_flops(
                lambda most: mean_visible(length, min(most, self.window)), own=0
            )
        for link in self._projecting:
            flops += 0 if isinstance(link.layer, SlidingAttention) else link.context_flops()
        return flops
