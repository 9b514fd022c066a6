"""The interface of all sequence layers, from one mixer to a whole language model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.calls import VERBS, checked
from stateline.layers.state import leaves_of, nbytes
from stateline.layers.stored_state import widened

StateT = TypeVar("StateT")

_VERY_LONG = 1 << 40
"""Length in tokens at which only a growing state exceeds one byte per token."""

LOW_PRECISION = (torch.bfloat16, torch.float16)


class KeepsFloat32(nn.Module):
    """A module whose own parameters can stay float32 when it is cast to half precision.

    Attributes:
        keeps_float32: Whether they do.
    """

    keeps_float32: ClassVar[bool] = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KeepsFloat32":
        """Move or cast; float32 parameters that stay float32 are only moved."""
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
    ``forward_chunk`` takes the next chunk of it, ``step`` takes the next token. The three agree::

        y = layer(x)
        state = layer.init_state(batch_size)
        y_head, state = layer.forward_chunk(x[:, :n], state)
        y_tail, state = layer.forward_chunk(x[:, n:], state)
        assert_close(y, torch.cat([y_head, y_tail], dim=1))

    for every ``n``, in outputs and in gradients. :func:`stateline.check_layer` checks this law and
    everything else that a layer promises.

    The state is a value: a ``NamedTuple`` of tensors, batch first. No method changes the state it
    is given, so a caller may keep an old one, branch from it, or detach it between segments. The
    one exception carries a trailing underscore: ``step_`` works in place.

    Calls from outside are checked before they run: an input of the wrong width, or a state of
    another layer or another number of rows, raises an :class:`~stateline.errors.InputError` (see
    :mod:`stateline.layers.calls`).

    Attributes:
        d_model: Width of the input.
        wants_feed_forward: Whether a block of this layer is followed by a feed-forward.
        is_mixer: Whether a wrapper stands in a block of its own, as a mixer does, and its core has
            no residual branches.
        keeps_float32: Whether the layer's own parameters stay float32 when a module that
            contains it is cast to half precision.
        optimizer_groups: Optimizer group (``"ssm"`` or ``"no_decay"``) of the layer's own
            parameters, by name, where it is not the default.
        any_batch_axes: Whether inputs may have any number of batch axes instead of one.
        max_len: Largest number of tokens in a sequence, or ``None`` for no limit. The model around
            the layer enforces it.
    """

    wants_feed_forward: ClassVar[bool] = True
    is_mixer: ClassVar[bool] = False
    optimizer_groups: ClassVar[Mapping[str, str]] = {}
    any_batch_axes: ClassVar[bool] = False
    max_len: int | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in VERBS:
            if name in vars(cls):
                setattr(cls, name, checked(name, vars(cls)[name]))

    def __init__(self, d_model: int) -> None:
        super().__init__()
        if d_model < 1:
            raise InputError(f"d_model must be at least 1, got {d_model=}")
        self.d_model = d_model

    @property
    def d_output(self) -> int:
        """Width of the output. Override where it differs from ``d_model``."""
        return self.d_model

    @property
    def causal(self) -> bool:
        """Whether outputs depend on earlier inputs only.

        A layer that is not causal has ``forward(x, lengths)`` alone, without states: see
        :class:`~stateline.layers.Bidirectional`.
        """
        return True

    @abstractmethod
    def init_state(self, batch_size: int, *, capacity: int = 0) -> StateT:
        """State before the first token, on the layer's device.

        Args:
            batch_size: Number of rows.
            capacity: Number of tokens for which the state's buffers have room, so that ``step_``
                can write in place. ``forward_chunk`` keeps that room free.
        """

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_output"]:
        """Process a whole sequence from the initial state. Override where there is a faster way."""
        return self.forward_chunk(x, self.init_state(x.shape[0]))[0]

    @abstractmethod
    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: StateT
    ) -> tuple[Float[Tensor, "batch length d_output"], StateT]:
        """Process the next ``length`` tokens of a sequence, and return the state after them."""

    def step(
        self, x: Float[Tensor, "batch d_model"], state: StateT
    ) -> tuple[Float[Tensor, "batch d_output"], StateT]:
        """Process the next token. Override where one token has a faster path."""
        y, state = self.forward_chunk(x[:, None], state)
        return y[:, 0], state

    def step_(
        self, x: Float[Tensor, "batch d_model"], state: StateT
    ) -> Float[Tensor, "batch d_output"]:
        """Process the next token and change the given state in place.

        The state must have been made with a capacity; its accumulators may be kept in half
        precision. Override where that saves a copy.
        """
        leaves = leaves_of(state)
        low = any(leaf.dtype in LOW_PRECISION for leaf in leaves)
        y, after = self.step(x, widened(state) if low else state)
        for old, new in zip(leaves, leaves_of(after), strict=True):
            old.copy_(new)
        return y

    def example_input(self, batch_size: int, length: int) -> Tensor:
        """Random input of the kind that the layer takes."""
        weight = next(self.parameters(), torch.empty(0))
        shape = (batch_size, length, self.d_model)
        return torch.randn(shape, dtype=weight.dtype, device=weight.device)

    @property
    def takes_vectors(self) -> bool:
        """Whether the input is a sequence of vectors of width ``d_model``."""
        return type(self).example_input is SequenceLayer.example_input

    def state_bytes(self, length: int) -> int:  # noqa: ARG002
        """Bytes of one row's state after ``length`` tokens. Override where the state grows."""
        return nbytes(self.init_state(1))

    @property
    def state_grows(self) -> bool:
        """Whether the state grows without bound: by at least a byte per token."""
        return self.state_bytes(_VERY_LONG) >= _VERY_LONG

    def flops_per_token(self, length: int) -> float:  # noqa: ARG002
        """Operations of ``forward`` per token of a sequence of ``length`` (multiply-add is two).

        Counts the matrix products of linear maps; override to add the cost of mixing along the
        sequence.
        """
        return 2.0 * sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))


# __init_subclass__ does not see the methods of this class itself.
for _name in VERBS:
    setattr(SequenceLayer, _name, checked(_name, vars(SequenceLayer)[_name]))

AnyLayer = SequenceLayer[Any]


def require_same_width(layer: AnyLayer) -> None:
    """Refuse a layer whose output cannot join a residual stream or enter the next layer.

    Raises:
        InputError: If the layer's output is wider or narrower than its input.
    """
    if layer.d_output != layer.d_model:
        raise InputError(
            f"{type(layer).__name__} maps {layer.d_model} channels to {layer.d_output}, but a "
            "layer of a model must keep the width: set n_outputs=1"
        )


def require_causal(layer: AnyLayer, user: str) -> None:
    """Refuse a layer whose outputs depend on later inputs.

    Args:
        layer: The layer.
        user: What needs a causal layer, for the message.

    Raises:
        InputError: If the layer is not causal.
    """
    if not layer.causal:
        raise InputError(
            f"{user} needs causal layers, got bidirectional(...), whose outputs depend on the "
            "whole row, so that it has no state and no steps: leave it out, or use it in tasks "
            "that classify or predict numbers"
        )


def row_inputs(layer: AnyLayer, x: Tensor, lengths: Tensor | None) -> tuple[Any, ...]:
    """Arguments of ``forward``: the lengths of the rows are for layers that are not causal."""
    return (x,) if layer.causal else (x, lengths)


def zeros(weight: Tensor, *shape: int) -> Tensor:
    """Plain zeros of a weight's dtype on its device, even if the weight is a DTensor."""
    return torch.zeros(shape, dtype=weight.dtype, device=weight.device)


def records(*inputs: Tensor) -> bool:
    """True where kernels that change a state must not run.

    That is where autograd may record the step or a graph is being captured.
    """
    return (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or any(type(x) is not Tensor for x in inputs)
    )


def values_at_hand(tensor: Tensor) -> bool:
    """True if reading values costs no device synchronisation."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
