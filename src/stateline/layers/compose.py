"""Layers made of layers."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stateline.layers.base import AnyLayer, SequenceLayer


class Residual(SequenceLayer[Any]):
    """A layer in a pre-norm residual branch: ``x + layer(norm(x))``. Its state is the layer's.

    Args:
        layer: Any sequence layer.
        norm: A map of each position by itself.
    """

    def __init__(self, layer: AnyLayer, norm: nn.Module) -> None:
        super().__init__(layer.d_model)
        self.norm, self.layer = norm, layer

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        """State of the layer."""
        return self.layer.init_state(batch_size, capacity=capacity)

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Add the layer's output to its input."""
        return x + self.layer(self.norm(x))

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: Any
    ) -> tuple[Float[Tensor, "batch length d_model"], Any]:
        """Add the layer's output to its input."""
        y, state = self.layer.forward_chunk(self.norm(x), state)
        return x + y, state

    def step(
        self, x: Float[Tensor, "batch d_model"], state: Any
    ) -> tuple[Float[Tensor, "batch d_model"], Any]:
        """Add the layer's output to its input."""
        y, state = self.layer.step(self.norm(x), state)
        return x + y, state

    def step_(
        self, x: Float[Tensor, "batch d_model"], state: Any
    ) -> Float[Tensor, "batch d_model"]:
        """Add the layer's output to its input."""
        return x + self.layer.step_(self.norm(x), state)

    def state_bytes(self, length: int) -> int:
        """Bytes of the layer's state."""
        return self.layer.state_bytes(length)

    def flops_per_token(self, length: int) -> float:
        """Operations of the layer."""
        return self.layer.flops_per_token(length)


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
    return type(layer.layer if isinstance(layer, Residual) else layer).__name__


class Chain(SequenceLayer[tuple[Any, ...]]):
    """Layers one after the other, each with its own state.

    Abstract: it does not say where they come from.

    Attributes:
        recomputes: Whether training keeps only the input of every link for the backward pass, and
            computes what is inside again (activation checkpointing).
    """

    recomputes = False

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
            x = self._run(link, x)
        return x

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: tuple[Any, ...]
    ) -> tuple[Float[Tensor, "batch length d_model"], tuple[Any, ...]]:
        """Apply the links in order, each to its own state."""
        after = []
        for link, before in zip(self.links, state, strict=True):
            x, new = self._run(link.forward_chunk, x, before)
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

    def _run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(function, *inputs, use_reentrant=False)
        return function(*inputs)


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
