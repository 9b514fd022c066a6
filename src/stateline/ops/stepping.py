"""Single steps of recurrences: their public functions, in place and on a copy of the state."""

import inspect
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, ParamSpec, TypeVar, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.ops.dispatch import dispatch, tensors_of
from stateline.ops.door import door, options_of
from stateline.ops.op import Op

P = ParamSpec("P")
T = TypeVar("T")

Stepper = Callable[..., Tensor]
"""``stepper(*signals, state)`` returns the output of one token and changes the state."""


def step_of(op: Op, whole: Callable[P, T]) -> Callable[P, T]:
    """The public function of one step of a recurrence, made from the one of whole sequences.

    Its arguments and results have no axis ``length``, and none of them may be omitted.
    """
    text = "One step of :func:`{}`: the output for the next token, and the state after it.\n\n"
    text += "The arguments are the same, without the axis of time; the state is required."
    return _step(op, whole, "_step", text, lambda result: result)


def step_in_place(op: Op, whole: Callable[P, tuple[T, Any]]) -> Callable[P, T]:
    """The public function of one step that returns the output alone and changes the state."""
    text = "One step of :func:`{}` without gradients: the state changes in place."
    return _step(op, whole, "_step_", text, lambda result: get_args(result)[0])


def _step(
    op: Op, whole: Any, ending: str, text: str, returned: Callable[[Any], Any]
) -> Callable[..., Any]:
    name, declared = whole.__name__ + ending, whole.check.signature
    parameters = [
        p.replace(
            annotation=_without_time(p.annotation, p.name != "state"),
            default="auto" if p.name == "backend" else p.empty,
        )
        for p in declared.parameters.values()
        if p.name != "starts"
    ]
    result = _without_time(returned(declared.return_annotation))
    signature = inspect.Signature(parameters, return_annotation=result)

    def run(*inputs: Any, backend: str = "auto", **named: Any) -> Any:
        if named:
            inputs = signature.bind(*inputs, **named).args
        return dispatch(op, name, *inputs, backend=backend)

    run.__name__ = run.__qualname__ = name
    run.__module__, run.__doc__ = whole.__module__, text.format(whole.__name__)
    run.__signature__ = signature  # type: ignore[attr-defined]
    return door(*whole.check.rules)(run)


def _without_time(annotation: Any, optional: bool = True) -> Any:
    """An annotation of tensors without their axis of time."""
    if hasattr(annotation, "dim_str"):
        axes = annotation.dim_str.split()
        return Float[Tensor, " ".join(axis for axis in axes if axis != "length")]
    if hasattr(annotation, "__origin__"):
        return annotation.__origin__[tuple(map(_without_time, get_args(annotation)))]
    kinds = (k for k in options_of(annotation) if optional or k is not type(None))
    return reduce(or_, (_without_time(k) if hasattr(k, "dim_str") else k for k in kinds))


def in_float32(state: Tensor) -> Tensor:
    """A state in float32 at least, in which steps compute."""
    return state.to(torch.promote_types(state.dtype, torch.float32))


def copying(step: Callable[..., tuple[Tensor, Any]]) -> Stepper:
    """A stepper that computes a new state and copies it over the old one.

    States may be kept in half precision; it computes in float32.

    Args:
        step: ``step(*signals, state)`` returns the output and the new state, a tensor or a named
            tuple of tensors.
    """

    def run(*inputs: Any) -> Tensor:
        *signals, state = inputs
        wide = (
            in_float32(state) if isinstance(state, Tensor) else type(state)(*map(in_float32, state))
        )
        y, after = step(*signals, wide)
        for old, new in zip(tensors_of((state,)), tensors_of((after,)), strict=True):
            old.copy_(new)
        return y

    return run


def on_a_copy(step_: Stepper) -> Callable[..., tuple[Tensor, Tensor]]:
    """A step that returns a new state, from one that changes its state in place.

    Args:
        step_: ``step_(*signals, state)`` returns the output.
    """

    def run(*inputs: Any) -> tuple[Tensor, Tensor]:
        *signals, state = inputs
        after = state.clone(memory_format=torch.contiguous_format)
        return step_(*signals, after), after

    return run


def zeros_before(x: Tensor, *shape: int) -> Tensor:
    """The zero state before the signal x, in float32 at least."""
    return x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32))
