"""Checks on every call of a sequence layer from outside: the input fits the layer and the state.

A call that does not fit would end in an error message about some inner matrix or, in kernels that
trust their arguments, in corrupted memory. Only shapes and types on the host are compared; calls
between nested layers and calls under ``torch.compile`` are not checked.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.documents import Documents, read, read_chunk
from stateline.layers.state import State, copied, has_sizes, leaves_of, select_rows, shown, sizes_of
from stateline.ops.dispatch import wants_tangent

VERBS = ("forward", "forward_chunk", "step", "step_")
"""The methods of layers that take an input."""

_nested: ContextVar[bool] = ContextVar("nested", default=False)


class _LeafSpec(NamedTuple):
    """Shape of one tensor of a state of one row; axes that may have any size are ``None``."""

    shape: tuple[int | None, ...]


_specs: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


class _Inside:
    """Calls in it come from inside another call.

    A context manager made from a generator would take longer: this one is a class.
    """

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _nested.set(True)

    def __exit__(self, *_: object) -> None:
        _nested.reset(self._token)


def is_inside() -> bool:
    """Whether a call comes from inside another call or from a compiler, and is not checked."""
    return torch.compiler.is_compiling() or _nested.get()


def checked(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """One of the :data:`VERBS` of a class of layers as its callers see it.

    Args:
        name: Its name.
        own: What the class defines; the result has it as ``own``.
    """

    @wraps(own)
    def run(self: Any, x: Tensor, *more: Any, starts: Any = None, **options: Any) -> Any:
        if not is_inside():
            return _call_from_outside(self, name, own, x, *more, starts=starts, **options)
        if starts is None:
            return own(self, x, *more, **options)
        return _call_packed(self, name, own, x, *more, starts=starts, **options)

    run.own = own  # type: ignore[attr-defined]
    return run


def takes_starts(verb: Callable[..., Any]) -> bool:
    """Whether a method reads packed rows itself, as its signature says."""
    found = signature(verb).parameters.values()
    return any(p.name == "starts" or p.kind is p.VAR_KEYWORD for p in found)


def call(layer: Any, name: str, x: Tensor, *more: Any, **options: Any) -> Any:
    """Call a method of a layer that decodes from outside."""
    return _call_from_outside(layer, name, getattr(type(layer), name), x, *more, **options)


def _call_from_outside(
    layer: Any,
    name: str,
    own: Callable[..., Any],
    x: Tensor,
    *more: Any,
    starts: Any = None,
    **options: Any,
) -> Any:
    """Check a call from outside, and run the layer's method.

    An input of no rows or no tokens runs as one row or one token of zeros, which is then dropped:
    no layer has to serve it. A chunk of no tokens returns a copy of the state.

    Args:
        layer: The layer.
        name: Name of the method.
        own: The method.
        x: Input.
        *more: The state, for all but ``forward``.
        starts: Where documents begin.
        **options: Options of the method.

    Raises:
        InputError: If the input or the state does not fit the layer, or under ``torch.jit.trace``.
    """
    if torch._C._get_tracing_state() is not None:
        raise InputError(
            f"torch.jit.trace cannot record {type(layer).__name__}, whose kernels and loops depend "
            "on the sizes of its input: use torch.export.export or torch.compile"
        )
    try:
        check_call(layer, name, x, *more)
        with _Inside():
            if 0 in x.shape[: _count_axes(name)]:
                return _call_empty(layer, name, own, x, *more, **options)
            if starts is None:
                return own(layer, x, *more, **options)
            return _call_packed(layer, name, own, x, *more, starts=starts, **options)
    except RuntimeError as error:
        if torch._C._functorch.peek_interpreter_stack() is None and not wants_tangent():
            raise
        raise InputError(
            f"the kernels of {type(layer).__name__} do not run under torch.vmap, torch.func and "
            'forward-mode derivatives: call it with stateline.ops.use_backend("reference"), which '
            "most layers allow, or give it the rows of all calls as one batch and take gradients "
            "with torch.autograd"
        ) from error


def check_call(layer: Any, name: str, x: Tensor, *more: Any) -> None:
    """Raise InputError if the input or the state does not fit the layer; arguments as above."""
    with _Inside():
        _check_input(layer, x, name)
        if name != "forward":
            _check_state(layer, x, *more)


def _call_packed(
    layer: Any,
    name: str,
    own: Callable[..., Any],
    x: Tensor,
    *more: Any,
    starts: Tensor | Documents,
    **options: Any,
) -> Any:
    """Run a method on packed rows: documents are cut out, unless the layer does it itself.

    Raises:
        InputError: If the starts do not fit the input.
    """
    if 0 in x.shape[:2]:
        return own(layer, x, *more, **options)
    documents = Documents.of(starts, x)
    if type(layer).packs:
        return own(layer, x, *more, starts=documents, **options)
    if name == "forward":
        return read(layer, own, x, documents, **options)
    return read_chunk(layer, own, x, *more, documents, **options)


def _count_axes(name: str) -> int:
    """Number of axes of an input's rows and tokens."""
    return 1 if name.startswith("step") else 2


def _call_empty(
    layer: Any, name: str, own: Callable[..., Any], x: Tensor, *more: Any, **options: Any
) -> Any:
    """Results for no rows or no tokens."""
    if options.get("reduce") is not None:
        raise InputError(f"reduce needs rows and tokens, got {shown(x)}: leave it out for none")
    axes = x.shape[: _count_axes(name)]
    x = x.new_zeros(*(max(1, size) for size in axes), *x.shape[len(axes) :])
    state = () if name == "forward" else (layer.init_state(len(x), capacity=1),)
    result = own(layer, x, *state, **options)
    kept = tuple(slice(size) for size in axes)
    if isinstance(result, Tensor):
        return result[kept]
    y, after = result
    return y[kept], copied(*more) if 0 in axes[1:] else select_rows(after, [])


def _check_input(layer: Any, x: Tensor, name: str) -> None:
    """Check the width of vectors; layers that take other inputs check these themselves."""
    if not isinstance(x, Tensor):
        raise InputError(
            f"{type(layer).__name__}.{name} takes a tensor, got {shown(x)}: give torch.as_tensor(x)"
        )
    axes = ("batch",) if name.startswith("step") else ("batch", "length")
    if not layer.takes_vectors:
        layer.check_values(x, axes)
        return
    if not x.is_floating_point():
        raise InputError(
            f"{type(layer).__name__}.{name} takes real numbers, got {x.dtype}: give x.float(), or "
            "token numbers to a model"
        )
    fits = x.ndim == len(axes) + 1 or layer.any_batch_axes
    if not fits or x.shape[-1:] != (layer.d_model,):
        wanted = ", ".join((*axes, f"d_model={layer.d_model}"))
        raise InputError(
            f"{type(layer).__name__}.{name} takes an input of shape ({wanted}), "
            f"got {tuple(x.shape)}"
        )


def _check_state(layer: Any, x: Tensor, state: State) -> None:
    """The state must have the layer's structure and shapes, and one row per row of the input."""
    if layer not in _specs:
        _specs[layer] = _spec(layer)
    if problem := _mismatch(state, _specs[layer], len(x), layer.any_batch_axes):
        raise InputError(
            f"{type(layer).__name__} cannot continue from this state: {problem}; pass a state of "
            f"this layer with the rows of the input (of shape {tuple(x.shape)})"
        )


@torch.no_grad()
def _spec(layer: Any) -> Any:
    """Structure and shapes of all states of a layer.

    Raises:
        InputError: If its states are not tensors or tuples of them.
    """
    least, roomy = layer.init_state(1), layer.init_state(1, capacity=1)
    _check_kind(layer, least)
    shapes, larger = ([leaf.shape for leaf in leaves_of(state)] for state in (least, roomy))
    return _tree_spec(least, roomy, layer.state_grows and shapes == larger)


def _check_kind(layer: Any, state: Any) -> None:
    if isinstance(state, tuple):
        for part in state:
            _check_kind(layer, part)
    elif not isinstance(state, Tensor):
        raise InputError(
            f"a state is a tensor with a row per sequence or a (named) tuple of states, but "
            f"{type(layer).__name__}.init_state makes {_name(state)} in it"
        )


def _tree_spec(least: State, roomy: State, any_slots: bool) -> Any:
    """Type and parts of a tuple, or the specification of a tensor.

    An axis may have any size if a capacity enlarges it. With ``any_slots``, the axis after the rows
    may, too: in tuples that can join tensors of different shapes, and in growing layers that ignore
    the capacity.
    """
    if isinstance(least, Tensor):
        sizes = enumerate(sizes_of(least, roomy))
        return _LeafSpec(tuple(None if any_slots and axis == 1 else size for axis, size in sizes))
    any_slots = any_slots or hasattr(least, "cat")
    pairs = zip(least, roomy, strict=True)
    return type(least), [_tree_spec(a, b, any_slots) for a, b in pairs]


def _mismatch(state: State, spec: Any, rows: int, any_batch_axes: bool) -> str:
    """How a state differs from its specification; empty if it does not."""
    if isinstance(spec, _LeafSpec):
        return _leaf_mismatch(state, spec.shape, rows, any_batch_axes)
    kind, parts = spec
    if not isinstance(state, tuple) or _fields(state) != _fields(kind) or len(state) != len(parts):
        return f"a {kind.__name__} of {len(parts)} parts is needed, got {_name(state)}"
    for part, its_spec in zip(state, parts, strict=True):
        if problem := _mismatch(part, its_spec, rows, any_batch_axes):
            return problem
    return ""


def _leaf_mismatch(
    leaf: State, wanted: tuple[int | None, ...], rows: int, any_batch_axes: bool
) -> str:
    if not isinstance(leaf, Tensor) or leaf.dtype != leaf.dtype.to_real():
        return f"a tensor of real numbers is needed, got {_name(leaf)}"
    shape = leaf.shape
    if any_batch_axes and len(shape) > len(wanted):
        shape = shape[len(shape) - len(wanted) :]
    elif shape[:1] != (rows,):
        found = f"{shape[0]} rows" if shape else "no rows"
        return f"the input has {rows} rows, the state {found} (a tensor of shape {tuple(shape)})"
    if not has_sizes(shape, wanted):
        sizes = ", ".join("any" if size is None else str(size) for size in wanted[1:])
        return f"a tensor of shape (rows, {sizes}) is needed, got {tuple(leaf.shape)}"
    return ""


def _fields(value: object) -> object:
    return getattr(value, "_fields", None)


def _name(value: object) -> str:
    if isinstance(value, Tensor):
        return f"one of {value.dtype}"
    if isinstance(value, tuple):
        return f"a {type(value).__name__} of {len(value)} parts"
    return f"a {type(value).__name__}"
