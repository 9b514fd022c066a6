"""The interface of all sequence layers, from one mixer to a whole language model."""

import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, make_dataclass
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar, get_type_hints

import torch
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.calls import VERBS, checked, takes_starts
from stateline.layers.decoder import Decoder
from stateline.layers.state import leaves_of, nbytes
from stateline.layers.stored_state import widened
from stateline.settings import Count, Settings, check_type

StateT = TypeVar("StateT")
KindT = TypeVar("KindT")

_VERY_LONG = 1 << 40
"""Length in tokens at which only a growing state exceeds one byte per token."""

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


class LayerType(ABCMeta):
    """The door of all layers: ``Layer(d_model, **keywords)`` makes its settings, then the layer.

    Their methods that take an input check the call, if it comes from outside.

    Attributes:
        packs: Whether ``forward_chunk``, and with it ``forward``, always takes ``starts``.
    """

    packs: bool

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> "LayerType":
        """Make a class of layers."""
        own = {verb: checked(verb, body[verb]) for verb in VERBS if verb in body}
        made: Any = super().__new__(mcs, name, bases, body | own)
        made.packs = takes_starts(made.forward_chunk) and made.resets is None
        return made

    def __call__(cls, *given: Any, **keywords: Any) -> Any:
        """Build a layer from keywords.

        Raises:
            InputError: If a keyword is unknown, or a value has the wrong type or is out of range.
        """
        positional = _parameters(cls)[0]
        named = {p.name: keywords.pop(p.name) for p in positional if p.name in keywords}
        if positional and positional[0].name == "d_model" and (given or "d_model" in named):
            check_type(cls.__name__, "d_model", given[0] if given else named["d_model"], Count)
        made: Any = cls
        return made.with_settings(cls.Settings(**keywords), *given, **named)

    @property
    def Settings(cls) -> type[Any]:
        """Frozen dataclass of the layer's settings."""
        return _settings_of(cls)

    @property
    def __signature__(cls) -> inspect.Signature:
        """Positional parameters of the constructor, and the settings by keyword."""
        hints = get_type_hints(cls.Settings, include_extras=True)
        keywords = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(cls.Settings)
        ]
        return inspect.Signature([*_parameters(cls)[0], *keywords])


@cache
def _parameters(cls: type) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """Positional and keyword-only parameters of a layer's constructor."""
    constructor: Any = cls.__init__  # type: ignore[misc]
    _, *parameters = inspect.signature(constructor).parameters.values()
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    return [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)], keywords


@cache
def _settings_of(cls: type) -> type[Any]:
    """The keywords of a layer's constructor, and the fields of the settings that it declares."""
    declaring = next(kind for kind in cls.__mro__ if "settings" in inspect.get_annotations(kind))
    declared = get_type_hints(declaring, include_extras=True)["settings"]
    shared = declared if inspect.isclass(declared) and issubclass(declared, Settings) else Settings
    hints = get_type_hints(cls.__init__, include_extras=True)  # type: ignore[misc]
    own = [
        (p.name, hints.get(p.name, object), MISSING if p.default is p.empty else p.default)
        for p in _parameters(cls)[1]
    ]
    name = f"{cls.__name__}Settings"
    made = make_dataclass(name, own, bases=(shared,), frozen=True, kw_only=True)
    made.__module__, made.__qualname__ = cls.__module__, f"{cls.__qualname__}.Settings"
    return made


class SequenceLayer(KeepsFloat32, Generic[StateT], metaclass=LayerType):
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

    A subclass defines ``init_state`` and ``forward_chunk``, and may define ``forward``, ``step``
    and ``step_`` where there is a faster way. Calls from outside are checked before these run: an
    input of the wrong width, or a state of another layer or another number of rows, raises an
    :class:`~stateline.errors.InputError` (see :mod:`stateline.layers.calls`).

    Packed rows hold several documents, which ``starts`` separates. Every layer can read them:
    documents are cut out (see :mod:`stateline.layers.documents`), unless ``forward_chunk`` has a
    parameter ``starts``. Then it, and ``forward`` if the layer defines it, get the
    :class:`~stateline.layers.documents.Documents`, to hand them on or to reset the state at each.

    Attributes:
        d_model: Width of the input.
        d_output: Width of the output.
        causal: Whether outputs depend on earlier inputs only. A layer that is not causal has
            ``forward(x, lengths)`` alone, without states: see
            :class:`~stateline.layers.Bidirectional`.
        wants_feed_forward: Whether a block of this layer is followed by a feed-forward.
        is_feed_forward: Whether the layer takes the place of a feed-forward.
        is_mixer: Whether a wrapper stands in a block of its own, as a mixer does, and its core has
            no residual branches.
        takes_several: Whether a wrapper takes several patterns; its core is then a stack of them.
        keeps_float32: Whether the layer's own parameters stay float32 when a module that
            contains it is cast to half precision.
        optimizer_groups: Optimizer group (``"ssm"`` or ``"no_decay"``) of the layer's own
            parameters, by name, where it is not the default.
        maps: Names of the layer's own parameters that are weights of linear maps, its last map
            last: they begin, and are updated, as those of ``nn.Linear``.
        balances: Whether the layer counts in training which of its experts positions use: see
            :class:`~stateline.layers.MoE`.
        any_batch_axes: Whether inputs may have any number of batch axes instead of one.
        resets: For layers whose kernels read documents on some backends only, a method: whether
            they do with this input (and, for ``forward_chunk``, state).
        chooses: Whether the layer chooses discretely, as a router does: a rounding may change its
            output, and its gradient may be an estimate. The law does not compare this gradient
            with central differences.
        max_len: Largest number of tokens in a sequence, or ``None`` for no limit. The model around
            the layer enforces it.
        settings: The settings: a frozen dataclass of the constructor's keywords, made and checked
            before the constructor runs. Layers with many settings, or that share them, declare a
            subclass of :class:`stateline.settings.Settings` by an annotation of this attribute in
            place of keywords; their constructors then take none.
        decodes: Whether this is the layer of a :class:`~stateline.layers.decoder.Decoder`, whose
            steps no gradient is asked of.
    """

    wants_feed_forward: ClassVar[bool] = True
    is_feed_forward: ClassVar[bool] = False
    is_mixer: ClassVar[bool] = False
    takes_several: ClassVar[bool] = False
    optimizer_groups: ClassVar[Mapping[str, str]] = {}
    maps: ClassVar[tuple[str, ...]] = ()
    balances: ClassVar[bool] = False
    any_batch_axes: ClassVar[bool] = False
    resets: Any = None
    chooses: ClassVar[bool] = False
    decodes: ClassVar[bool] = False
    causal: bool = True
    max_len: int | None = None
    settings: Any

    @classmethod
    def with_settings(cls: type[KindT], settings: Settings, *given: Any, **named: Any) -> KindT:
        """Build a layer from settings that have been checked.

        Args:
            settings: Its settings, or those of a layer that has the same and more.
            *given: What the constructor takes by position.
            **named: The same by name.
        """
        kind: Any = cls
        layer = kind.__new__(kind)
        object.__setattr__(layer, "settings", settings)
        values = vars(settings)
        own = {p.name: values[p.name] for p in _parameters(kind)[1] if p.name in values}
        layer.__init__(*given, **named, **own)
        return layer

    def __init__(self, d_model: int, d_output: int | None = None) -> None:
        super().__init__()
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

    def forward(self, x: Tensor, *more: Any, **options: Any) -> Tensor:
        """Process whole sequences from the initial state.

        Args:
            x: Input (batch, length, d_model).
            *more: ``lengths`` of the rows, for layers that are not causal.
            **options: ``starts``: True at the first position of each document (batch, length), if
                rows hold several: each is then read from the initial state, as in a row of its own.
                Options of this kind of layer.

        Returns:
            Output (batch, length, d_output).
        """
        return self.forward_chunk(x, self.init_state(x.shape[0]), *more, **options)[0]

    @abstractmethod
    def forward_chunk(
        self, x: Tensor, state: StateT, *more: Any, **options: Any
    ) -> tuple[Tensor, StateT]:
        """Process the next ``length`` tokens of sequences.

        Args:
            x: Input (batch, length, d_model).
            state: State before it.
            *more: None.
            **options: ``starts``: True at the first position of each document. The state continues
                the document that a row begins with, unless another begins there; the last document
                of the row leaves the state. Options of this kind of layer.

        Returns:
            Output (batch, length, d_output), and the state after it.
        """

    def step(self, x: Tensor, state: StateT, *more: Any, **options: Any) -> tuple[Tensor, StateT]:
        """Process the next token: input (batch, d_model), output (batch, d_output)."""
        y, state = self.forward_chunk(x[:, None], state, *more, **options)
        return y[:, 0], state

    def step_(self, x: Tensor, state: StateT, *more: Any, **options: Any) -> Tensor:
        """Process the next token and change the given state in place.

        The state must have been made with a capacity; its accumulators may be kept in half
        precision.
        """
        leaves = leaves_of(state)
        low = any(leaf.dtype in LOW_PRECISION for leaf in leaves)
        y, after = self.step(x, widened(state) if low else state, *more, **options)
        for old, new in zip(leaves, leaves_of(after), strict=True):
            old.copy_(new)
        return y

    def decoder(self) -> Decoder["SequenceLayer[StateT]"]:
        """Prepare what follows from the present weights, to decode many tokens without gradients.

        A session has one; a layer of its own has one, too.
        """
        return Decoder(self)

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
