"""The interface that every sequence layer obeys, from one mixer to a whole language model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stateline.layers.state import nbytes

StateT = TypeVar("StateT")

_VERY_LONG = 1 << 40
"""Tokens: no state of constant size has as many bytes."""

LOW_PRECISION = (torch.bfloat16, torch.float16)


class KeepsFloat32(nn.Module):
    """A module whose own parameters may stay float32 when what contains it is cast down.

    Attributes:
        keeps_float32: Whether they do.
    """

    keeps_float32: ClassVar[bool] = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KeepsFloat32":
        """Move or cast; parameters that keep float32 are moved, but not cast to half precision."""
        if not self.keeps_float32:
            return super()._apply(fn, recurse)
        for child in self.children() if recurse else ():
            child._apply(fn)

        def at_least_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in LOW_PRECISION else moved

        return super()._apply(at_least_float32, recurse=False)


class SequenceLayer(KeepsFloat32, ABC, Generic[StateT]):
    """A causal map from a sequence to a sequence of the same length.

    A layer computes one function in three ways. ``forward`` takes the whole sequence at once,
    ``forward_chunk`` takes the next piece of it, ``step`` takes the next token. The three agree::

        y = layer(x)
        state = layer.init_state(batch_size)
        y_head, state = layer.forward_chunk(x[:, :n], state)
        y_tail, state = layer.forward_chunk(x[:, n:], state)
        assert_close(y, torch.cat([y_head, y_tail], dim=1))

    for every ``n``, in outputs and in gradients. That law, and what else a layer promises, is what
    :func:`stateline.check_layer` checks.

    The state is a value: a ``NamedTuple`` of tensors, batch first. No method changes the state it
    is given, so a caller may keep an old one, branch from it, or detach it between segments. The
    one exception carries a trailing underscore: ``step_`` works in place.

    Attributes:
        d_model: Width of the input; the output is as wide unless the layer says otherwise.
        wants_feed_forward: Whether a block of this layer is followed by a feed-forward.
        keeps_float32: Whether the layer's own parameters stay float32 when a module that
            contains it is cast to half precision.
        optimizer_groups: Optimizer group (``"ssm"`` or ``"no_decay"``) of the layer's own
            parameters, by name, where it is not the default.
        max_len: Most tokens of a sequence, or ``None`` for any number. Whole models see to it,
            where tokens enter.
    """

    wants_feed_forward: ClassVar[bool] = True
    optimizer_groups: ClassVar[Mapping[str, str]] = {}
    max_len: int | None = None

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    @abstractmethod
    def init_state(self, batch_size: int, *, capacity: int = 0) -> StateT:
        """State before the first token, on the layer's device.

        Args:
            batch_size: Number of rows.
            capacity: For how many tokens ``step_`` shall find room in the state's buffers.
                ``forward_chunk`` keeps that room free.
        """

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Process a whole sequence from the initial state."""

    @abstractmethod
    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: StateT
    ) -> tuple[Float[Tensor, "batch length d_model"], StateT]:
        """Process the next ``length`` tokens of a sequence, and return the state after them."""

    def step(
        self, x: Float[Tensor, "batch d_model"], state: StateT
    ) -> tuple[Float[Tensor, "batch d_model"], StateT]:
        """Process the next token. Override where one token has a faster path."""
        y, state = self.forward_chunk(x[:, None], state)
        return y[:, 0], state

    def step_(
        self, x: Float[Tensor, "batch d_model"], state: StateT
    ) -> Float[Tensor, "batch d_model"]:
        """Process the next token, changing in place a state that the caller gives away.

        The state must have been made with a capacity. Override where that saves a copy.
        """
        y, after = self.step(x, state)
        for old, new in zip(pytree.tree_leaves(state), pytree.tree_leaves(after), strict=True):
            old.copy_(new)
        return y

    def example_input(self, batch_size: int, length: int) -> Tensor:
        """Random input of the kind that the layer takes."""
        weight = next(self.parameters(), torch.empty(0))
        shape = (batch_size, length, self.d_model)
        return torch.randn(shape, dtype=weight.dtype, device=weight.device)

    def state_bytes(self, length: int) -> int:  # noqa: ARG002
        """Bytes of one row's state after ``length`` tokens. Override where the state grows."""
        return nbytes(self.init_state(1))

    @property
    def state_grows(self) -> bool:
        """Whether the state grows without end: by at least a byte for every token."""
        return self.state_bytes(_VERY_LONG) >= _VERY_LONG

    def flops_per_token(self, length: int) -> float:  # noqa: ARG002
        """Operations of ``forward`` per token of a sequence of ``length`` (multiply-add is two).

        Counts the matrix products; override to add what mixing along the sequence costs.
        """
        return 2.0 * sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))


AnyLayer = SequenceLayer[Any]


def zeros(weight: Tensor, *shape: int) -> Tensor:
    """Zeros for a state, of a weight's dtype and on its device, but whole where that is sharded."""
    return torch.zeros(shape, dtype=weight.dtype, device=weight.device)


def values_at_hand(tensor: Tensor) -> bool:
    """Whether a look at the values is free: a check of input is not worth a wait for a GPU."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
