"""Transformers that stand at several depths of a stack and read its input again, as in Zamba2."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import AnyLayer, flops_inside, require_same_width
from stateline.layers.compose import (
    ActivationCheckpointing,
    Around,
    Branch,
    Composite,
    Stack,
    inside,
)
from stateline.layers.linear import Linear
from stateline.layers.mixers.attention import Attention
from stateline.layers.mixers.feed_forward import FeedForward
from stateline.layers.mixers.heads import PLAIN_ROPE, Rope
from stateline.layers.norm import RMSNorm
from stateline.settings import Count, NotNegative


class Adapted(nn.Module):
    r"""A linear map of several depths, and maps of low rank: :math:`W x + [U_i V_i x]_i`.

    Args:
        owner: The module whose map W is.
        name: Its name there; it is looked up at each call, for PEFT puts its own map there.
        rank: Rank of each :math:`U_i V_i`.
        parts: Number of equal parts i of the output; with 0, the map is W.
    """

    def __init__(self, owner: nn.Module, name: str, rank: int = 0, parts: int = 0) -> None:
        super().__init__()
        self._owner, self._name = (owner,), name  # in a tuple, so that it is no part of this module
        base = self._base
        self.down = Linear(base.in_features, parts * rank, bias=False) if parts else None
        rows = base.out_features // max(parts, 1)
        self.up = nn.ModuleList(Linear(rank, rows, bias=False) for _ in range(parts))

    @property
    def weight(self) -> Tensor:
        """The matrix W."""
        return self._base.weight

    @property
    def _base(self) -> nn.Linear:
        return cast("nn.Linear", getattr(self._owner[0], self._name))

    def forward(self, x: Tensor) -> Tensor:
        """Map the last axis."""
        y: Tensor = self._base(x)
        if self.down is None:
            return y
        low = self.down(x).chunk(len(self.up), dim=-1)
        corrections = [up(part) for up, part in zip(self.up, low, strict=True)]
        return y + torch.cat(corrections, dim=-1)


class TransformerWeights(nn.Module):
    """The weights of a transformer that stands at several depths; its input has 2 ``d_model``."""

    def __init__(self, d_model: int, d_hidden: int, *, bias: bool, norm_eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(2 * d_model, eps=norm_eps)
        self.qkv = Linear(2 * d_model, [2 * d_model] * 3, bias=False)
        self.out_proj = Linear(2 * d_model, d_model, bias=False)
        self.feed_forward_norm = RMSNorm(d_model, eps=norm_eps)
        self.up = Linear(d_model, [d_hidden] * 2, bias=bias)
        self.down = Linear(d_hidden, d_model, bias=bias)


class Place(Around):
    """A transformer at one of its depths, with adapters; its weights belong to the wrapper."""

    def __init__(
        self,
        weights: TransformerWeights,
        attention: dict[str, Any],
        *,
        rank: int,
        adapts_attention: bool,
    ) -> None:
        d_model, d_hidden = weights.out_proj.out_features, weights.down.in_features
        super().__init__(2 * d_model, d_output=d_model)
        self._weights = (weights,)  # in a tuple, so that they are no part of this module
        with torch.device("meta"):  # maps that are replaced
            self.attention = Attention(2 * d_model, **attention)
            self.feed_forward = FeedForward(d_model, activation="geglu_exact", d_hidden=d_hidden)
        self.attention.d_output = d_model
        self.attention.register_module("qkv", Adapted(weights, "qkv", rank, 3 * adapts_attention))
        self.attention.register_module("out_proj", Adapted(weights, "out_proj"))
        self.feed_forward.register_module("in_proj", Adapted(weights, "up", rank, 1))
        self.feed_forward.register_module("out_proj", Adapted(weights, "down"))
        self.out_proj = Linear(d_model, d_model, bias=False)

    @property
    def inner(self) -> AnyLayer:
        """The attention; the transformer has its state."""
        return self.attention

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised input of attention."""
        return self._weights[0].norm(x), x

    def leave(self, kept: Tensor, y: Tensor) -> Tensor:  # noqa: ARG002
        """The output of the feed-forward after attention."""
        return self.out_proj(self.feed_forward(self._weights[0].feed_forward_norm(y)))

    def flops_per_token(self, length: int) -> float:
        """Operations of the adapters of this depth and of the common weights."""
        return super().flops_per_token(length) + flops_inside(self._weights[0], length)


class SharedTransformer(ActivationCheckpointing, Composite):
    r"""Layers, and transformers that stand at several depths between them.

    .. math::
        u = W_i\, \mathrm{mlp}(\mathrm{norm}(\mathrm{attention}(\mathrm{norm}([h; x])))), \qquad
        h \leftarrow h + f(\mathrm{norm}(h + u))

    where x is the input of the wrapper, in a whole model the embedding, h the stream, and f the
    first layer of a part; u enters this layer alone. In a pattern, each argument is a part,
    ``shared_transformer(mamba2*6, mamba2*6)``. Attention is as wide as [h; x], its scores have the
    factor :math:`\sqrt{2 / d_{\mathrm{head}}}`, and the feed-forward is a ``geglu_exact``. Each
    depth i has a map :math:`W_i`, a state, and adapters of low rank for the first map of the
    feed-forward and for queries, keys and values, each :math:`W + U_i V_i`.

    Args:
        core: A stack of the parts; another layer is the only part.
        n_heads: Number of heads of attention; must divide ``2 * d_model``.
        d_hidden: Hidden width of the feed-forward; by default 4 ``d_model``.
        blocks: Number of transformers; the depths use them in turn.
        rank: Rank of the adapters.
        adapts_attention: Whether queries, keys and values have adapters.
        position: Positions of attention.
        bias: Whether the feed-forward has biases.
        norm_eps: Added to the mean square in the norms.
        first: Whether a transformer also stands before the first part.

    Raises:
        InputError: If the heads do not divide the width, a number is not positive, or there are
            more transformers than depths.

    References:
        Glorioso et al., "The Zamba2 Suite", 2024, section 2.
    """

    takes_several: ClassVar[bool] = True

    def __init__(  # noqa: PLR0913
        self,
        core: AnyLayer,
        *,
        n_heads: Count = 4,
        d_hidden: Count | None = None,
        blocks: Count = 1,
        rank: Count = 8,
        adapts_attention: bool = True,
        position: Literal["none"] | Rope = PLAIN_ROPE,
        bias: bool = False,
        norm_eps: NotNegative = 1e-5,
        first: bool = True,
    ) -> None:
        super().__init__(core.d_model)
        require_same_width(core)
        d_hidden = 4 * self.d_model if d_hidden is None else d_hidden
        self.core = core if isinstance(core, Stack) else Stack(core)
        self.causal, self.first = core.causal, first
        depths = len(self.core.links) - (not first)
        if blocks > depths:
            raise InputError(
                f"shared_transformer has {depths} depths, too few for blocks={blocks}: give more "
                "parts, or first=True"
            )
        self.blocks = nn.ModuleList(
            TransformerWeights(self.d_model, d_hidden, bias=bias, norm_eps=norm_eps)
            for _ in range(blocks)
        )
        self.rank, self.adapts_attention, self.n_heads = rank, adapts_attention, n_heads
        self.d_hidden, self.bias, self.norm_eps = d_hidden, bias, norm_eps
        self.position = position
        attention = {
            "n_heads": n_heads,
            "position": position,
            "score_scale": (n_heads / self.d_model) ** 0.5,
        }
        found = [cast("TransformerWeights", self.blocks[i % blocks]) for i in range(depths)]
        self.places = nn.ModuleList(
            Place(weights, attention, rank=rank, adapts_attention=adapts_attention)
            for weights in found
        )

    def _plan(self) -> Iterator[tuple[Place | None, AnyLayer]]:
        """The layers of all parts, each with the transformer that stands before it."""
        places = iter(cast("list[Place]", list(self.places)))
        for i, part in enumerate(self.core.links):
            for j, link in enumerate(part.links if isinstance(part, Stack) else [part]):
                yield next(places) if j == 0 and (i or self.first) else None, link

    @property
    def links(self) -> Sequence[AnyLayer]:
        """What is called, in order: a transformer, then the layer inside the branch after it."""
        found: list[AnyLayer] = []
        for place, link in self._plan():
            found += [link] if place is None else [place, inside(link)]
        return found

    def run_links(self, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        """The output, where ``call`` runs one of the links."""
        h = x
        for place, link in self._plan():
            if place is None:
                h = call(link, h)
                continue
            entering = h + call(place, torch.cat([h, x], dim=-1))
            if isinstance(link, Branch):
                h = link.leave(h, call(link.layer, link.enter(entering)[0]))
            else:
                h = call(link, entering)
        return h
