"""Layers made of layers."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from stateline.layers.base import AnyLayer, SequenceLayer, require_same_width, row_inputs
from stateline.layers.decoder import prepared
from stateline.layers.dropout import Dropout


class Around(SequenceLayer[Any]):
    """A layer around another one; both have the same state.

    Abstract: subclasses say which layer is inside; by default its input and output are also
    the whole layer's.
    """

    @property
    @abstractmethod
    def inner(self) -> AnyLayer:
        """The layer inside."""

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the inner layer, and a tensor that :meth:`leave` needs."""
        return x, x

    def leave(self, kept: Tensor, y: Tensor) -> Tensor:  # noqa: ARG002
        """Output, from what was kept and the output of the inner layer."""
        return y

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        """Initial state of the inner layer."""
        return self.inner.init_state(batch_size, capacity=capacity)

    @override
    def forward(self, x: Tensor, lengths: Tensor | None = None, **own: Any) -> Tensor:
        entered, kept = self.enter(x)
        return self.leave(kept, self.inner(*row_inputs(self.inner, entered, lengths), **own))

    @override
    def forward_chunk(self, x: Tensor, state: Any, **own: Any) -> tuple[Tensor, Any]:
        entered, kept = self.enter(x)
        y, state = self.inner.forward_chunk(entered, state, **own)
        return self.leave(kept, y), state

    @override
    def step(self, x: Tensor, state: Any, **own: Any) -> tuple[Tensor, Any]:
        entered, kept = self.enter(x)
        y, state = self.inner.step(entered, state, **own)
        return self.leave(kept, y), state

    @override
    def step_(self, x: Tensor, state: Any, **own: Any) -> Tensor:
        entered, kept = self.enter(x)
        return self.leave(kept, self.inner.step_(entered, state, **own))

    def state_bytes(self, length: int) -> int:
        """Bytes of the inner layer's state."""
        return self.inner.state_bytes(length)


class Branch(Around):
    """A layer on a residual branch.

    Abstract: subclasses say where the norm stands.

    Args:
        layer: Any sequence layer.
        norm: A normalisation, applied to each position separately.
        multiplier: Factor of the layer's output.
        dropout: Probability that an entry of the layer's output is dropped in training.
        stream_multiplier: Factor of the stream to which the output is added.
    """

    def __init__(
        self,
        layer: AnyLayer,
        norm: nn.Module,
        multiplier: float = 1.0,
        dropout: float = 0.0,
        stream_multiplier: float = 1.0,
    ) -> None:
        super().__init__(layer.d_model)
        require_same_width(layer)
        self.norm, self.layer, self.causal = norm, layer, layer.causal
        self.multiplier, self.stream_multiplier = multiplier, stream_multiplier
        self.dropout = Dropout(dropout)

    @property
    @prepared
    def inner(self) -> AnyLayer:
        """The layer."""
        return self.layer

    def leave(self, kept: Tensor, y: Tensor) -> Tensor:
        """The scaled stream plus the scaled output of the layer, some of it dropped in training."""
        y = self.dropout(y) if self.dropout.rate else y
        x = kept if self.stream_multiplier == 1 else kept * self.stream_multiplier
        return x + (y if self.multiplier == 1 else y * self.multiplier)


class Residual(Branch):
    """A pre-norm residual branch: ``x + layer(norm(x))``."""

    @override
    def step_(self, x: Tensor, state: Any, **own: Any) -> Tensor:
        return self.leave(x, self.layer.step_(self.norm(x), state, **own))

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised stream, and the stream."""
        return self.norm(x), x


class PostNorm(Branch):
    """A post-norm residual branch, as in the first Transformer: ``norm(x + layer(x))``."""

    def leave(self, kept: Tensor, y: Tensor) -> Tensor:
        """The normalised sum of stream and output."""
        return self.norm(super().leave(kept, y))


class NormAfter(Branch):
    """A residual branch whose output is normalised, as in OLMo 2: ``x + norm(layer(x))``."""

    def leave(self, kept: Tensor, y: Tensor) -> Tensor:
        """The sum of the stream and the normalised output."""
        return super().leave(kept, self.norm(y))


class Sandwich(Residual):
    """A branch with norms on both sides, as in Gemma 2: ``x + after(layer(norm(x)))``.

    Args:
        layer: Any sequence layer.
        norm: The normalisation of its input.
        after: The normalisation of its output.
        *join: As of every branch.
    """

    def __init__(self, layer: AnyLayer, norm: nn.Module, after: nn.Module, *join: float) -> None:
        super().__init__(layer, norm, *join)
        self.after = after

    def leave(self, kept: Tensor, y: Tensor) -> Tensor:
        """The sum of the stream and the normalised output."""
        return super().leave(kept, self.after(y))


class NormedResidual(Branch):
    """A branch that adds to its normed input, as in MiniMax-01: ``h + layer(h)``, h = norm(x)."""

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised stream, twice."""
        h = self.norm(x)
        return h, h


class Composite(SequenceLayer[tuple[Any, ...]]):
    """Layers that are called in a fixed order, each with its own state.

    Abstract: subclasses say which layers (``links``), and how their outputs make the output, in all
    modes at once (``run_links``).
    """

    @property
    @abstractmethod
    def links(self) -> Sequence[AnyLayer]:
        """The layers in the order of their calls; one layer may occur several times."""

    @abstractmethod
    def run_links(self, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        """The output, where ``call(layer, x, **options)`` runs the links in order."""

    def run(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Call a link or one of its methods on whole sequences."""
        return function(*inputs, **options)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> tuple[Any, ...]:
        """One initial state per link."""
        return tuple(link.init_state(batch_size, capacity=capacity) for link in self.links)

    @override
    def forward(self, x: Tensor, lengths: Tensor | None = None, **packed: Any) -> Tensor:
        def call(layer: AnyLayer, h: Tensor, **own: Any) -> Tensor:
            return self.run(layer, *row_inputs(layer, h, lengths), **own, **packed)

        return self.run_links(x, call)

    @override
    def forward_chunk(
        self, x: Tensor, state: tuple[Any, ...], **packed: Any
    ) -> tuple[Tensor, tuple[Any, ...]]:
        def advance(layer: AnyLayer, *inputs: Any, **own: Any) -> tuple[Tensor, Any]:
            return self.run(layer.forward_chunk, *inputs, **own, **packed)

        return self._advance(x, state, advance)

    @override
    def step(self, x: Tensor, state: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        return self._advance(x, state, lambda layer, *inputs, **own: layer.step(*inputs, **own))

    def _advance(
        self, x: Tensor, state: tuple[Any, ...], advance: Callable[..., tuple[Tensor, Any]]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        after: list[Any] = []

        def call(layer: AnyLayer, h: Tensor, **own: Any) -> Tensor:
            y, new = advance(layer, h, state[len(after)], **own)
            after.append(new)
            return y

        return self.run_links(x, call), tuple(after)

    @override
    def step_(self, x: Tensor, state: tuple[Any, ...]) -> Tensor:
        states = iter(state)
        return self.run_links(x, lambda layer, h, **own: layer.step_(h, next(states), **own))

    def state_bytes(self, length: int) -> int:
        """Bytes of all states."""
        return sum(link.state_bytes(length) for link in self.links)

    def flops_per_token(self, length: int) -> float:
        """Operations of all links."""
        return sum(link.flops_per_token(length) for link in self.links)


class ParallelResidual(Composite):
    r"""Pre-norm residual branches side by side: :math:`y = x + \sum_i f_i(\mathrm{norm}_i(x))`.

    All branches have the same input. In a stack, by contrast, each branch also sees what the
    branches before it have added.

    Args:
        *branches: At least one residual branch, all of the same width.

    References:
        Black et al., "GPT-NeoX-20B", 2022, section 2.1.
    """

    def __init__(self, *branches: Residual) -> None:
        super().__init__(branches[0].d_model)
        self.branches = nn.ModuleList(branches)
        self.causal = all(branch.causal for branch in branches)

    @property
    def links(self) -> Sequence[AnyLayer]:
        """The layers of the branches."""
        return [branch.layer for branch in cast("list[Residual]", self.branches)]

    def run_links(self, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        """Add the outputs of all branches to their common input."""
        y = x
        for branch in cast("list[Residual]", self.branches):
            y = branch.leave(y, call(branch.layer, branch.norm(x)))
        return y


def title(layer: AnyLayer) -> str:
    """Name of a layer in tables: the class of the layer inside its residual branch.

    Example:
        >>> from stateline.layers import LSTM
        >>> branch = Residual(LSTM(4), nn.LayerNorm(4))
        >>> title(branch), title(ParallelResidual(branch, branch))
        ('LSTM', 'LSTM + LSTM')
    """
    if isinstance(layer, ParallelResidual):
        return " + ".join(type(link).__name__ for link in layer.links)
    return type(inside(layer)).__name__


class ActivationCheckpointing:
    """A composite layer that supports activation checkpointing of its parts.

    Attributes:
        checkpoints_activations: Whether only the inputs of the parts are kept for the backward
            pass, which computes their activations again. Parts that checkpoint themselves are
            called as usual.
    """

    checkpoints_activations = False

    def run(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Call a part or one of its methods, with checkpointing where it is on."""
        part = getattr(function, "__self__", function)
        own = (
            part is not self
            and isinstance(part, ActivationCheckpointing)
            and part.checkpoints_activations
        )
        if self.checkpoints_activations and torch.is_grad_enabled() and not own:
            return checkpoint(function, *inputs, use_reentrant=False, **options)
        return function(*inputs, **options)


class Chain(ActivationCheckpointing, Composite):
    """Layers in sequence.

    Abstract: subclasses say which layers.
    """

    def run_links(self, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        """The output of the last link."""
        for link in self.links:
            x = call(link, x)
        return x

    @override
    def step_(self, x: Tensor, state: tuple[Any, ...]) -> Tensor:
        for link, own in zip(self.links, state, strict=True):
            x = link.step_(x, own)
        return x


def inside(link: AnyLayer) -> AnyLayer:
    """The layer of a residual branch, or the layer."""
    return link.layer if isinstance(link, Branch) else link


class Stack(Chain):
    """Different layers in sequence.

    Args:
        *layers: At least one sequence layer, all of the same width.
    """

    def __init__(self, *layers: AnyLayer) -> None:
        super().__init__(layers[0].d_model)
        for layer in layers:
            require_same_width(layer)
        self.layers = nn.ModuleList(layers)
        self.causal = all(layer.causal for layer in layers)

    @property
    @prepared
    def links(self) -> Sequence[AnyLayer]:
        """The layers."""
        return cast("list[AnyLayer]", list(self.layers))


def checkpoint_activations(stack: Stack, on: bool) -> None:
    """Switch activation checkpointing of a stack and of its links on or off.

    A checkpointed stack keeps the inputs of its links; a link of several passes, the inputs of each
    pass.
    """
    for part in (stack, *stack.links):
        if isinstance(part, ActivationCheckpointing):
            part.checkpoints_activations = on
