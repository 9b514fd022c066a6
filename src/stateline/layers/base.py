"""The interface of all sequence layers, from one mixer to a whole language model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.calls import call, call_packed, is_inside
from stateline.layers.decoder import Decoder
from stateline.layers.documents import Documents
from stateline.layers.state import leaves_of, nbytes
from stateline.layers.stored_state import widened
from stateline.settings import at_least, checked

StateT = TypeVar("StateT")
KindT = TypeVar("KindT")

_VERY_LONG = 1 << 40
"""Length in tokens at which only a growing state exceeds one byte per token."""

_PACKAGE = __name__.removesuffix("layers.base")

LOW_PRECISION = (torch.bfloat16, torch.float16)


class KeepsFloat32(nn.Module):
    """A module whose own parameters can stay float32 when it is cast to half precision.

    Attributes:
        keeps_float32: Whether the module's own parameters stay float32.
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

    A subclass defines ``init_state`` and ``_forward_chunk``, and may define ``_forward``, ``_step``
    and ``_step_`` where there is a faster way. The methods without underscore, which users and
    other layers call, check the call and then run these: an input of the wrong width, or a state of
    another layer or another number of rows, raises an :class:`~stateline.errors.InputError` (see
    :mod:`stateline.layers.calls`).

    Attributes:
        d_model: Width of the input.
        d_output: Width of the output.
        causal: Whether outputs depend on earlier inputs only. A layer that is not causal has
            ``forward(x, lengths)`` alone, without states: see
            :class:`~stateline.layers.Bidirectional`.
        wants_feed_forward: Whether a block of this layer is followed by a feed-forward.
        is_mixer: Whether a wrapper stands in a block of its own, as a mixer does, and its core has
            no residual branches.
        takes_several: Whether a wrapper takes several patterns; its core is then a stack of them.
        keeps_float32: Whether the layer's own parameters stay float32 when a module that
            contains it is cast to half precision.
        optimizer_groups: Optimizer group (``"ssm"`` or ``"no_decay"``) of the layer's own
            parameters, by name, where it is not the default.
        any_batch_axes: Whether inputs may have any number of batch axes instead of one.
        packs: Whether ``_forward`` and ``_forward_chunk`` take ``starts`` themselves: composite
            layers pass it on, and some kernels reset the state at each document. For all other
            layers, documents are cut out: see :mod:`stateline.layers.documents`.
        chooses: Whether the layer chooses discretely, as a router does: a rounding may change its
            output, and its gradient may be an estimate. The law does not compare this gradient
            with central differences.
        max_len: Largest number of tokens in a sequence, or ``None`` for no limit. The model around
            the layer enforces it.
        settings: Dataclass of the constructor's keywords, in layers that have one.
        decodes: Whether this is the layer of a :class:`~stateline.layers.decoder.Decoder`, whose
            steps no gradient is asked of.
    """

    wants_feed_forward: ClassVar[bool] = True
    is_mixer: ClassVar[bool] = False
    takes_several: ClassVar[bool] = False
    optimizer_groups: ClassVar[Mapping[str, str]] = {}
    any_batch_axes: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    chooses: ClassVar[bool] = False
    decodes: ClassVar[bool] = False
    causal: bool = True
    max_len: int | None = None
    settings: Any = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Check what constructors of this package are given; other code answers for its own."""
        super().__init_subclass__(**keywords)
        if "__init__" in vars(cls) and cls.__module__.startswith(_PACKAGE):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, d_model: int, *, d_output: int | None = None) -> None:
        super().__init__()
        at_least(1, d_model=d_model)
        self.d_model = d_model
        self.d_output = d_model if d_output is None else d_output

    @abstractmethod
    def init_state(self, batch_size: int, *, capacity: int = 0) -> StateT:
        """State before the first token, on the layer's device.

        Args:
            batch_size: Number of rows.
            capacity: Number of tokens for which the state's buffers have room, so that ``step_``
                can write in place. ``forward_chunk`` keeps that room free.
        """

    def forward(
        self,
        x: Tensor,
        *more: Any,
        starts: Bool[Tensor, "batch length"] | Documents | None = None,
        **options: Any,
    ) -> Tensor:
        """Process whole sequences from the initial state.

        Args:
            x: Input (batch, length, d_model).
            *more: ``lengths`` of the rows, for layers that are not causal.
            starts: True at the first position of each document, if rows hold several: each is then
                read from the initial state, as in a row of its own.
            **options: Options of this kind of layer.

        Returns:
            Output (batch, length, d_output).
        """
        if starts is not None:
            return call_packed(self, "forward", x, *more, starts=starts, **options)
        if is_inside():
            return self._forward(x, *more, **options)
        return call(self, "forward", x, *more, **options)

    def forward_chunk(
        self,
        x: Tensor,
        state: StateT,
        *,
        starts: Bool[Tensor, "batch length"] | Documents | None = None,
        **options: Any,
    ) -> tuple[Tensor, StateT]:
        """Process the next ``length`` tokens of sequences.

        Args:
            x: Input (batch, length, d_model).
            state: State before it.
            starts: True at the first position of each document. The state continues the document
                that a row begins with, unless another begins there; the last document of the row
                leaves the state.
            **options: Options of this kind of layer.

        Returns:
            Output (batch, length, d_output), and the state after it.
        """
        if starts is not None:
            return call_packed(self, "forward_chunk", x, state, starts=starts, **options)
        if is_inside():
            return self._forward_chunk(x, state, **options)
        return call(self, "forward_chunk", x, state, **options)

    def step(self, x: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """Process the next token: input (batch, d_model), output (batch, d_output)."""
        return self._step(x, state) if is_inside() else call(self, "step", x, state)

    def step_(self, x: Tensor, state: StateT) -> Tensor:
        """Process the next token and change the given state in place.

        The state must have been made with a capacity; its accumulators may be kept in half
        precision.
        """
        return self._step_(x, state) if is_inside() else call(self, "step_", x, state)

    def decoder(self) -> Decoder["SequenceLayer[StateT]"]:
        """Prepare what follows from the present weights, to decode many tokens without gradients.

        A session has one; a layer of its own has one, too.
        """
        return Decoder(self)

    def _forward(self, x: Tensor, *more: Any, **packed: Any) -> Tensor:
        return self._forward_chunk(x, self.init_state(x.shape[0]), *more, **packed)[0]

    @abstractmethod
    def _forward_chunk(self, x: Tensor, state: StateT) -> tuple[Tensor, StateT]: ...

    def _step(self, x: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        y, state = self._forward_chunk(x[:, None], state)
        return y[:, 0], state

    def _step_(self, x: Tensor, state: StateT) -> Tensor:
        leaves = leaves_of(state)
        low = any(leaf.dtype in LOW_PRECISION for leaf in leaves)
        y, after = self._step(x, widened(state) if low else state)
        for old, new in zip(leaves, leaves_of(after), strict=True):
            old.copy_(new)
        return y

    def begins_anew(self, x: Tensor, state: StateT | None = None) -> bool:  # noqa: ARG002
        """Whether ``_forward`` (with a state, ``_forward_chunk``) takes ``starts`` with this input.

        Only for layers without ``packs``, whose kernels take ``starts`` on some backends.
        """
        return False

    def example_input(self, batch_size: int, length: int) -> Tensor:
        """Random input of the kind that the layer takes."""
        weight = next(self.parameters(), torch.empty(0))
        shape = (batch_size, length, self.d_model)
        return torch.randn(shape, dtype=weight.dtype, device=weight.device)

    def check_values(self, x: Tensor, axes: tuple[str, ...] = ("batch", "length")) -> None:
        """Raise InputError if an input from outside, not of vectors, cannot be used.

        Args:
            x: Input.
            axes: Names of its axes, without the axis of numbers at one position.
        """

    @property
    def takes_vectors(self) -> bool:
        """Whether the input is a sequence of vectors of width ``d_model``."""
        return type(self).example_input is SequenceLayer.example_input

    def state_bytes(self, length: int) -> int:
        """Bytes of one row's state after ``length`` tokens; each needs as much as one of capacity.

        Override where a state grows otherwise.
        """
        empty, first = (nbytes(self.init_state(1, capacity=n)) for n in (0, 1))
        return empty + length * (first - empty)

    @property
    def state_grows(self) -> bool:
        """Whether the state grows without bound: by at least a byte per token."""
        return self.state_bytes(_VERY_LONG) >= _VERY_LONG

    def flops_per_token(self, length: int) -> float:
        """Operations of ``forward`` per token of a sequence of ``length`` (multiply-add is two).

        Counts the matrix products of linear maps, and the layers inside. Override to add the cost
        of mixing along the sequence.
        """
        return flops_inside(self, length)


def flops_inside(module: nn.Module, length: int) -> float:
    """Operations per token of the linear maps and layers in a module."""
    flops = 2.0 * module.weight.numel() if isinstance(module, nn.Linear) else 0.0
    for child in module.children():
        if isinstance(child, SequenceLayer):
            flops += child.flops_per_token(length)
        else:
            flops += flops_inside(child, length)
    return flops


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
        user: The feature that needs a causal layer, for the message.

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


def accumulates(*fields: str) -> Callable[[type[KindT]], type[KindT]]:
    """Class decorator of a state's named tuple: rounding errors accumulate in these fields.

    It adds the static method ``accumulators``, see :data:`stateline.layers.state.State`.

    Example:
        >>> from typing import NamedTuple
        >>> @accumulates("mean")
        ... class MovingAverageState(NamedTuple):
        ...     mean: Tensor
        >>> MovingAverageState.accumulators()
        ('mean',)
    """

    def mark(kind: Any) -> Any:
        kind.accumulators = staticmethod(lambda: fields)
        return kind

    return mark


def zeros(weight: Tensor, *shape: int) -> Tensor:
    """Plain zeros of a weight's dtype on its device, even if the weight is a DTensor.

    Raises:
        InputError: If a size is no whole number or negative, as a ``batch_size`` or ``capacity``
            may be.
    """
    if any(isinstance(size, float | str | None) or size < 0 for size in shape):
        raise InputError(
            f"batch_size and capacity must be whole numbers from 0, got a state of {shape}"
        )
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
