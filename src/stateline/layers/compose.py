"""Layers made of layers."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stateline.layers.base import AnyLayer, SequenceLayer


class Branch(SequenceLayer[Any]):
    """A layer beside the residual stream. Its state is the layer's.

    Abstract: it does not say how the stream enters the layer, nor how the layer's output joins it.

    Args:
        layer: Any sequence layer.
        norm: A map of each position by itself.
    """

    def __init__(self, layer: AnyLayer, norm: nn.Module) -> None:
        super().__init__(layer.d_model)
        self.norm, self.layer = norm, layer

    @abstractmethod
    def enter(self, x: Tensor) -> Tensor:
        """What the layer sees of the stream."""

    @abstractmethod
    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """The stream after the layer has given ``y``."""

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        """State of the layer."""
        return self.layer.init_state(batch_size, capacity=capacity)

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Join the layer's output to the stream."""
        return self.join(x, self.layer(self.enter(x)))

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: Any
    ) -> tuple[Float[Tensor, "batch length d_model"], Any]:
        """Join the layer's output to the stream."""
        y, state = self.layer.forward_chunk(self.enter(x), state)
        return self.join(x, y), state

    def step(
        self, x: Float[Tensor, "batch d_model"], state: Any
    ) -> tuple[Float[Tensor, "batch d_model"], Any]:
        """Join the layer's output to the stream."""
        y, state = self.layer.step(self.enter(x), state)
        return self.join(x, y), state

    def step_(
        self, x: Float[Tensor, "batch d_model"], state: Any
    ) -> Float[Tensor, "batch d_model"]:
        """Join the layer's output to the stream."""
        return self.join(x, self.layer.step_(self.enter(x), state))

    def state_bytes(self, length: int) -> int:
        """Bytes of the layer's state."""
        return self.layer.state_bytes(length)

    def flops_per_token(self, length: int) -> float:
        """Operations of the layer."""
        return self.layer.flops_per_token(length)


class Residual(Branch):
    """A pre-norm residual branch: ``x + layer(norm(x))``."""

    def enter(self, x: Tensor) -> Tensor:
        """Normalised."""
        return self.norm(x)

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum."""
        return x + y


class PostNorm(Branch):
    """A post-norm residual branch, as in the first Transformer: ``norm(x + layer(x))``."""

    def enter(self, x: Tensor) -> Tensor:
        """As it is."""
        return x

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum, normalised."""
        return self.norm(x + y)


class Parallel(SequenceLayer[tuple[Any, ...]]):
    r"""Pre-norm residual branches side by side: :math:`y = x + \sum_i f_i(\mathrm{norm}_i(x))`.

    All branches see the same input, unlike those of a stack, where each sees what the one before
    it has added.

    Args:
        *branches: At least one residual branch, all of the same width.

    References:
        Black et al., "GPT-NeoX-20B", 2022, section 2.1.
    """

    def __init__(self, *branches: Residual) -> None:
        super().__init__(branches[0].d_model)
        self.branches = nn.ModuleList(branches)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> tuple[Any, ...]:
        """One state per branch."""
        return tuple(b.init_state(batch_size, capacity=capacity) for b in self._branches)

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Add the outputs of all branches to their common input."""
        y = x
        for branch in self._branches:
            y = y + branch.layer(branch.norm(x))
        return y

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: tuple[Any, ...]
    ) -> tuple[Float[Tensor, "batch length d_model"], tuple[Any, ...]]:
        """Add the outputs of all branches, each with its own state, to their common input."""
        y, after = x, []
        for branch, before in zip(self._branches, state, strict=True):
            added, new = branch.layer.forward_chunk(branch.norm(x), before)
            y = y + added
            after.append(new)
        return y, tuple(after)

    def step(
        self, x: Float[Tensor, "batch d_model"], state: tuple[Any, ...]
    ) -> tuple[Float[Tensor, "batch d_model"], tuple[Any, ...]]:
        """Add the outputs of all branches, each with its own state, to their common input."""
        y, after = x, []
        for branch, before in zip(self._branches, state, strict=True):
            added, new = branch.layer.step(branch.norm(x), before)
            y = y + added
            after.append(new)
        return y, tuple(after)

    def step_(
        self, x: Float[Tensor, "batch d_model"], state: tuple[Any, ...]
    ) -> Float[Tensor, "batch d_model"]:
        """Add the outputs of all branches, each with its own state, to their common input."""
        y = x
        for branch, own in zip(self._branches, state, strict=True):
            y = y + branch.layer.step_(branch.norm(x), own)
        return y

    def state_bytes(self, length: int) -> int:
        """Bytes of all states."""
        return sum(b.state_bytes(length) for b in self._branches)

    def flops_per_token(self, length: int) -> float:
        """Operations of all branches."""
        return sum(b.flops_per_token(length) for b in self._branches)

    @property
    def _branches(self) -> list[Residual]:
        return cast("list[Residual]", list(self.branches))


def title(layer: AnyLayer) -> str:
    """What a layer is called in a table: by the layer inside its residual branch.

    Example:
        >>> from stateline.layers import LSTM
        >>> branch = Residual(LSTM(4), nn.LayerNorm(4))
        >>> title(branch), title(Parallel(branch, branch))
        ('LSTM', 'LSTM + LSTM')
    """
    if isinstance(layer, Parallel):
        return " + ".join(title(branch) for branch in layer._branches)
    return type(layer.layer if isinstance(layer, Branch) else layer).__name__


class Recomputes:
    """A composite that can keep only the inputs of its parts for the backward pass.

    Attributes:
        recomputes: Whether it does, and computes what is inside of them again (activation
            checkpointing). A part that does so itself is left to it.
    """

    recomputes = False

    def run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call a part, or one of its verbs."""
        part = getattr(function, "__self__", function)
        left_to_it = part is not self and isinstance(part, Recomputes) and part.recomputes
        if self.recomputes and torch.is_grad_enabled() and not left_to_it:
            return checkpoint(function, *inputs, use_reentrant=False)
        return function(*inputs)


class Chain(Recomputes, SequenceLayer[tuple[Any, ...]]):
    """Layers one after the other, each with its own state.

    Abstract: it does not say where they come from.
    """

    @property
    @abstractmethod
    def links(self) -> Sequence[AnyLayer]:
        """The layers in order; one layer may stand in several places."""

    def init_state(self, batch_size: int, *, capacity: int = 0) -> tuple[Any, ...]:
        """One state per link."""
        return tuple(link.init_state(batch_size, capacity=capacity) for link in self.links)

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Apply the links in order."""
        for link in self.links:
            x = self.run(link, x)
        return x

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: tuple[Any, ...]
    ) -> tuple[Float[Tensor, "batch length d_model"], tuple[Any, ...]]:
        """Apply the links in order, each to its own state."""
        after = []
        for link, before in zip(self.links, state, strict=True):
            x, new = self.run(link.forward_chunk, x, before)
            after.append(new)
        return x, tuple(after)

    def step(
        self, x: Float[Tensor, "batch d_model"], state: tuple[Any, ...]
    ) -> tuple[Float[Tensor, "batch d_model"], tuple[Any, ...]]:
        """Apply the links in order, each to its own state."""
        after = []
        for link, before in zip(self.links, state, strict=True):
            x, new = link.step(x, before)
            after.append(new)
        return x, tuple(after)

    def step_(
        self, x: Float[Tensor, "batch d_model"], state: tuple[Any, ...]
    ) -> Float[Tensor, "batch d_model"]:
        """Apply the links in order, each to its own state."""
        for link, own in zip(self.links, state, strict=True):
            x = link.step_(x, own)
        return x

    def state_bytes(self, length: int) -> int:
        """Bytes of all states."""
        return sum(link.state_bytes(length) for link in self.links)

    def flops_per_token(self, length: int) -> float:
        """Operations of all links."""
        return sum(link.flops_per_token(length) for link in self.links)


class Stack(Chain):
    """Different layers one after the other.

    Args:
        *layers: At least one sequence layer, all of the same width.
    """

    def __init__(self, *layers: AnyLayer) -> None:
        super().__init__(layers[0].d_model)
        self.layers = nn.ModuleList(layers)

    @property
    def links(self) -> Sequence[AnyLayer]:
        """The layers."""
        return cast("list[AnyLayer]", list(self.layers))


def recompute(stack: Stack, on: bool) -> None:
    """Let a stack recompute its links, and those that consist of several passes each pass."""
    for part in (stack, *stack.links):
        if isinstance(part, Recomputes):
            part.recomputes = on
