"""Differentiable functions from a forward and a backward function on tensors.

Only the inputs are saved for the backward pass. Where a graph is captured (``torch.compile``), the
function is one opaque PyTorch operator, so that every layer compiles, even with an FFT or a kernel.
Elsewhere it is an autograd function, which costs several times less to record.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.ops.declared import options_of
from stateline.ops.dispatch import PLAIN, wants_gradient

_TYPES = {int: "SymInt", float: "float", bool: "bool", str: "str"}


class KernelOp:
    """One function, differentiable once, made of a forward and a backward function.

    Both must be pure and return new tensors. They may branch on shape, dtype and device, but not on
    values. Their arguments and results may be named tuples: the operator takes and returns the
    parts of these one by one, in a schema that follows from the annotations of ``forward``.

    Args:
        name: Operator name, unique in the library.
        forward: ``forward(*inputs) -> outputs``, whose inputs are annotated as tensors, plain
            values, ``None``, or named tuples of these; outputs are tensors and named tuples.
        backward: ``backward(*grad_outputs, *inputs)`` returns the gradients of the inputs, tensors
            or arrays with as many entries, nested like the inputs and in their order. Entries for
            other inputs than floating-point tensors are ignored; at the end, they may be left out.
        fake: Like ``forward``, for tensors without data: empty outputs of the right shapes. By
            default ``forward`` itself, which must then be made of PyTorch's functions. Needed where
            ``forward`` counts on a length, as a loop does: a graph would hold for that one alone.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        fake: Callable[..., Any] | None = None,
    ) -> None:
        self.forward, self._backward = forward, backward
        signature = inspect.signature(forward)
        returned = signature.return_annotation
        self._single = returned is Tensor
        self._inputs = _Layout(p.annotation for p in signature.parameters.values())
        self._outputs = _Layout([Tensor] if self._single else get_args(returned))
        given, found = self._inputs.types, self._outputs.types
        self._op = _operator(name, self.run_flat, given, found)
        self._op.register_fake(lambda *flat: self.run_flat(*flat, run=fake))
        self._op.register_autograd(self.by_operator, setup_context=_save)
        self._op_backward = _operator(
            f"{name}_backward", self._own_gradients, [*found, *given], ["Tensor[]"]
        )
        self._op_backward.register_fake(
            lambda *flat: empty_like(*filter(_has_gradient, flat[len(found) :]))
        )

    def __call__(self, *inputs: Any) -> Any:
        """The outputs of ``forward``."""
        first = inputs[0][0] if isinstance(inputs[0], tuple) else inputs[0]
        opaque = torch.compiler.is_compiling() or type(first) not in PLAIN
        if not (opaque or torch.is_grad_enabled()):
            return self.forward(*inputs)
        flat = _flat(inputs)
        if opaque:
            found = self._op(*flat)
        elif wants_gradient(*flat):
            found = _Recorded.apply(self, *flat)
        else:
            return self.forward(*inputs)
        return found if self._single else tuple(self._outputs.nested(found))

    def run_flat(self, *flat: Any, run: Callable[..., Any] | None = None) -> Any:
        """Outputs part by part, from inputs part by part."""
        found = (run or self.forward)(*self._inputs.nested(flat))
        return found if self._single else tuple(_flat(found))

    def gradients(self, *flat: Any) -> list[Tensor | None]:
        """For each input its gradient; ``None`` if it has none."""
        count = len(self._outputs.types)
        grads, inputs = self._outputs.nested(flat[:count]), flat[count:]
        found = _flat(self._backward(*grads, *self._inputs.nested(inputs)))
        found += [None] * (len(inputs) - len(found))
        return [_like(g, x) for g, x in zip(found, inputs, strict=True)]

    def _own_gradients(self, *flat: Any) -> list[Tensor]:
        """A gradient for each input that can have one: contiguous, and no view, for operators."""
        pairs = zip(self.gradients(*flat), flat[len(self._outputs.types) :], strict=True)
        found = [torch.zeros_like(x) if g is None else g for g, x in pairs if _has_gradient(x)]
        found = [g.contiguous() for g in found]
        return [g.clone() if g.untyped_storage().nbytes() > g.nbytes else g for g in found]

    def by_operator(self, ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The gradients of all inputs, by the operator that cannot be differentiated again."""
        inputs = _saved(ctx)
        found = iter(self._op_backward(*grads, *inputs))
        return tuple(next(found) if _has_gradient(x) else None for x in inputs)


def _operator(
    name: str, run: Callable[..., Any], given: Sequence[str], returned: Sequence[str]
) -> Any:
    arguments = ", ".join(f"{kind} _{i}" for i, kind in enumerate(given))
    schema = f"({arguments}) -> ({', '.join(returned)})"
    return torch.library.custom_op(f"stateline::{name}", run, mutates_args=(), schema=schema)


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass of an autograd function whose gradients cannot be differentiated again.

    PyTorch's ``once_differentiable`` returns constants if the gradients of the outputs need no
    gradient, although the gradients of the inputs depend on the inputs, too.
    """

    @wraps(backward)
    def backward_once(ctx: Any, *grads: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        return _Final.apply(found, *grads, *ctx.saved_tensors)

    return backward_once


class _Final(torch.autograd.Function):
    """Return gradients unchanged; to differentiate them again is an error."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor | None], *made_from: Tensor | None) -> Any:  # noqa: ARG004
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # noqa: ARG004
        raise InputError(
            "this kernel has first derivatives only, and a second one was asked for: most layers "
            'have it under use_backend("reference")'
        )


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: KernelOp, *flat: Any) -> Any:
        _save(ctx, flat)
        ctx.op = op
        return op.run_flat(*flat)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.op.gradients(*grads, *_saved(ctx))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any = None) -> None:  # noqa: ARG001
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]


def _saved(ctx: Any) -> list[Any]:
    pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
    return [other if tensor is None else tensor for tensor, other in pairs]


class _Layout:
    """The named tuples among some annotations, and the types of all parts in PyTorch's schemas."""

    def __init__(self, annotations: Iterable[Any]) -> None:
        self.types: list[str] = []
        self._parts: list[tuple[Any, _Layout] | None] = []
        for annotation in annotations:
            options = options_of(annotation)
            kind = next(option for option in options if option is not NoneType)
            kind = kind.__origin__ if get_origin(kind) is Annotated else kind
            if hasattr(kind, "_fields"):
                inner = _Layout(kind.__annotations__.values())
                self.types += inner.types
                self._parts.append((kind, inner))
            else:
                self.types.append(_TYPES.get(kind, "Tensor") + "?" * (NoneType in options))
                self._parts.append(None)

    def nested(self, flat: Iterable[Any]) -> list[Any]:
        """The inverse of ``_flat``."""
        rest = iter(flat)
        return [next(rest) if p is None else p[0](*p[1].nested(rest)) for p in self._parts]


def _flat(values: Iterable[Any]) -> list[Any]:
    """The parts of all tuples, one after the other."""
    found: list[Any] = []
    for x in values:
        if isinstance(x, tuple):
            found += _flat(x)
        else:
            found.append(x)
    return found


def _has_gradient(x: Any) -> bool:
    """Whether an input has a gradient."""
    return isinstance(x, Tensor) and x.is_floating_point()


def _like(gradient: Any, x: Any) -> Tensor | None:
    """A gradient with the shape and dtype of its input, if that has one."""
    if gradient is None or not _has_gradient(x):
        return None
    return torch.as_tensor(gradient).reshape(x.shape).to(x.dtype)


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is no instance of a subclass, as sharded parameters are."""
    return type(x) in PLAIN


def values_at_hand(x: Tensor) -> bool:
    """Whether a tensor has values, and reading them costs no device synchronisation."""
    return x.device.type == "cpu" and is_plain(x) and not torch.compiler.is_compiling()


def empty_like(*inputs: Tensor) -> list[Tensor]:
    """Contiguous tensors of the same shapes, dtypes and device."""
    return [x.new_empty(x.shape) for x in inputs]
