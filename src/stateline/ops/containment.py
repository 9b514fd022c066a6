"""What is not finite stays in its document, and reaches no earlier position.

Kernels compute chunks by products of matrices, and multiply by zero what a token must not see; an
FFT adds all inputs and subtracts them again. Either turns one infinite value into NaN everywhere.
While the results are finite, nothing of this has happened, so it costs one sum over the outputs,
and one over their gradients. If such a sum is not finite, the function runs again with zeros at the
positions that are not finite, and outputs that see one of these become NaN. Training asks nothing
of this: it discards an update as a whole (:func:`all_or_nothing`).
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import ref

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.ops.declared import declared
from stateline.ops.kernel_op import values_at_hand

P = ParamSpec("P")
T = TypeVar("T")
Values = Mapping[str, Any]

BEFORE = ("state", "past")
"""Arguments that hold what came before the signals."""

TIMES = ("length", "slot")
"""Axes of time: of signals, and of keys and values."""

TIMED = (*TIMES, "past")
"""What has an axis of time."""


_discarded = ContextVar("discarded", default=False)


@contextmanager
def all_or_nothing() -> Iterator[None]:
    """Contain nothing inside: the caller discards all results if one number is not finite.

    For training loops, which discard an update whose loss or gradient is not finite. It saves a sum
    over the outputs of every op and one over their gradients.
    """
    before = _discarded.set(True)
    try:
        yield
    finally:
        _discarded.reset(before)


def known_finite(x: Tensor) -> bool:
    """Whether all numbers are finite, or nobody asks.

    Not known where the sum of all is not finite, in compiled code, and where reading a value would
    cost a synchronisation, as on a GPU.
    """
    return values_at_hand(x) and (_discarded.get() or _is_finite(x))


class Reach(NamedTuple):
    """The slots that each output sees, from ``first`` to ``last``.

    In attention, slots are those of the keys. Elsewhere they are those of the past, or one for the
    state, and then the positions of the signals.
    """

    first: Int[Tensor, "*batch output"]
    last: Int[Tensor, "*batch output"]

    def sees(self, bad: Bool[Tensor, "*batch slot"]) -> Bool[Tensor, "*batch output"]:
        """Outputs that see one of these slots."""
        count = F.pad(bad.long().cumsum(-1), (1, 0))
        return count.gather(-1, self.last + 1) > count.gather(-1, self.first)

    def seen(self, bad: Bool[Tensor, "*batch output"], slots: int) -> Bool[Tensor, "*batch slot"]:
        """Slots that one of these outputs sees."""
        change, one = bad.new_zeros(*bad.shape[:-1], slots + 1, dtype=torch.int64), bad.long()
        change.scatter_add_(-1, self.first, one).scatter_add_(-1, self.last + 1, -one)
        return change.cumsum(-1)[..., :-1] > 0


def reach(values: Values, shape: Sequence[int], before: int) -> Reach:
    """What a recurrence sees: its document.

    Args:
        values: The arguments of the call by name; ``starts`` may be among them.
        shape: Shape of the signals without the axes of their entries, (*batch, length).
        before: Number of slots before the signals.
    """
    starts = values.get("starts")
    starts = getattr(starts, "mask", starts)
    place = torch.arange(before, before + shape[-1]).expand(*shape)
    first = torch.zeros_like(place) if starts is None else (place * starts).cummax(-1).values
    return Reach(first, place)


def filtered(values: Values, shape: Sequence[int], before: int) -> Reach:
    """What a filter sees: as far back as it has taps."""
    first, last = reach(values, shape, before)
    return Reach(first.maximum(last - values["kernel"].shape[1] + 1), last)


def every(values: Values, shape: Sequence[int], before: int) -> Reach:
    """What a recurrence sees that is read at some positions only."""
    stride = values["stride"]
    return Reach(*(x[..., stride - 1 :: stride] for x in reach(values, shape, before)))


def contained(see: Callable[..., Reach] = reach) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Contain what is not finite in a causal function, in its outputs and in their gradients.

    The annotations tell the arguments apart: signals have an axis ``length``, keys an axis
    ``slot``, and other tensors of numbers are weights, except for those of :data:`BEFORE`. Outputs
    are (*batch, output, ...), alone or with a state after them. Logarithms of decays may be
    -infinity. An output that sees something else that is not finite is NaN, and a constant to the
    backward pass. A gradient that is not finite, of another output, makes NaN of the gradients of
    all that this output sees, and of all weights.

    Args:
        see: Gives what the outputs see, from the arguments of :func:`reach`.

    Returns:
        The decorator. The function stays as it is in compiled code, and where reading a value would
        cost a synchronisation, as on a GPU.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @wraps(function)
        def run(*args: P.args, **keywords: P.kwargs) -> T:
            result: Any = function(*args, **keywords)
            y = result[0] if isinstance(result, tuple) else result
            if torch.compiler.is_compiling() or type(y) is not Tensor or not y.is_cpu:
                return result
            if _discarded.get() or torch._C._are_functorch_transforms_active():
                return result
            finite = _is_finite(y)
            if finite and not y.requires_grad:
                return result
            spoilt, call = None, _Call(signature, see, args, keywords)
            if (not finite and call.spoilt.any()) or (y.requires_grad and call.hides):
                spoilt, result = call.spoilt, call.with_zeros(function)
                y = result[0] if isinstance(result, tuple) else result
            if y.requires_grad:
                held = _Call(signature, see, *_each(_Held, (args, keywords)))
                _watch(held, y, () if y is result else result[1:])
            return result if spoilt is None else _spoiled(result, spoilt)

        return run

    return decorate


def _is_finite(x: Tensor) -> bool:
    """Whether the sum of all numbers is finite."""
    precise = torch.promote_types(x.dtype, torch.float32)
    return math.isfinite(x.detach().sum(dtype=precise).item())


def _each(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Arguments with something else in the place of every tensor of numbers."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _each(change, part) for name, part in value.items()}
    if isinstance(value, tuple):
        parts = [_each(change, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


class _Held:
    """What is kept of a tensor for the backward pass: its shape and its place in the graph.

    The numbers are not kept: activation checkpointing frees them.
    """

    def __init__(self, x: Tensor) -> None:
        self.shape, self.node, self.number = x.shape, x.grad_fn, x.output_nr
        self.tensor = ref(x) if x.requires_grad else None

    def spoil(self, bad: Tensor | None) -> None:
        """In the running backward pass, make NaN of some positions of the gradient, or of all."""
        tensor = None if self.tensor is None else self.tensor()

        def spoilt(gradient: Tensor) -> Tensor:
            handle.remove()
            everywhere = gradient.new_ones((), dtype=torch.bool)
            return gradient.masked_fill(
                everywhere if bad is None else _on(bad, gradient), torch.nan
            )

        def at_node(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            handle.remove()
            own = gradients[self.number]  # none if nothing asks for it
            own = own if own is None else spoilt(own)
            return *gradients[: self.number], own, *gradients[self.number + 1 :]

        if tensor is not None:
            handle = tensor.register_hook(spoilt)
        elif self.node is not None:
            handle = self.node.register_prehook(at_node)


def _on(mask: Tensor, x: Tensor) -> Tensor:
    """A mask of the first axes of a tensor."""
    return mask.view(*mask.shape, *[1] * (x.ndim - mask.ndim))


class _Part(NamedTuple):
    """A tensor of an argument: its name, what it is, and the number of its axes of entries.

    It is a signal (``length``), keys or values (``slot``), ``state`` or ``past``, or a weight.
    """

    name: str
    kind: str
    entries: int
    value: Any


def _parts(values: Values, annotations: Values, kind: str = "") -> Iterator[_Part]:
    """The tensors of numbers among the arguments."""
    for name, value in values.items():
        own = kind or (name if name in BEFORE else "")
        if isinstance(value, tuple):
            yield from _parts(value._asdict(), type(value).__annotations__, own)  # type: ignore[attr-defined]
        elif isinstance(value, _Held) or (isinstance(value, Tensor) and value.is_floating_point()):
            told = declared(annotations[name])
            axes = [] if told is None else told.text.split()
            own = own or next((axis for axis in TIMES if axis in axes), "weight")
            yield _Part(name, own, len(axes) - 1 - axes.index(own) if own in axes else 0, value)


class _Call:
    """The arguments of one call, and what its outputs see."""

    def __init__(
        self, signature: inspect.Signature, see: Callable[..., Reach], args: Any, keywords: Any
    ) -> None:
        self._signature, self._see, self._given = signature, see, (args, keywords)

    @cached_property
    def values(self) -> Values:
        """The arguments by name."""
        bound = self._signature.bind(*self._given[0], **self._given[1])
        bound.apply_defaults()
        return bound.arguments

    @cached_property
    def parts(self) -> list[_Part]:
        """The tensors of numbers."""
        annotations = {name: p.annotation for name, p in self._signature.parameters.items()}
        return list(_parts(self.values, annotations))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the signals, (*batch, length)."""
        first = next(part for part in self.parts if part.kind == "length")
        return tuple(first.value.shape[: len(first.value.shape) - first.entries])

    @cached_property
    def slots(self) -> tuple[int, int]:
        """Number of slots before the signals, and of all."""
        size = {p.kind: p.value.shape[len(self.shape) - 1] for p in self.parts if p.kind in TIMED}
        before = size.get("past", 1)
        return (0, size["slot"]) if "slot" in size else (before, before + self.shape[-1])

    @cached_property
    def reach(self) -> Reach:
        """What the outputs see."""
        return self._see(self.values, self.shape, self.slots[0])

    @cached_property
    def bad(self) -> dict[str, Tensor]:
        """Positions, slots and rows that are not finite."""
        batch, (before, slots) = self.shape[:-1], self.slots
        sizes = {"length": self.shape[-1], "slot": slots, "past": before, "state": 1}
        bad = {kind: torch.zeros(*batch, size, dtype=torch.bool) for kind, size in sizes.items()}
        for part in self.parts:
            if part.kind in bad:
                wrong = ~part.value.isfinite()
                if part.name == "log_decay":
                    wrong &= part.value != -torch.inf
                axes = len(batch) + (part.kind != "state")
                own = wrong.flatten(axes).any(-1) if wrong.ndim > axes else wrong
                bad[part.kind] |= own if part.kind != "state" else own[..., None]
        return bad

    @cached_property
    def hides(self) -> bool:
        """Whether no output need show what a state holds, but gradients of factors would."""
        if self._given[1].get("starts") is None:  # given by name, see Backend
            return False
        return not all(_is_finite(part.value) for part in self.parts if part.kind in BEFORE)

    @cached_property
    def spoilt(self) -> Bool[Tensor, "*batch output"]:
        """Outputs that see something that is not finite."""
        bad, kinds = self.bad, {part.kind for part in self.parts}
        if "slot" in kinds:
            return self.reach.sees(bad["slot"]) | bad["length"]
        before = bad["past" if "past" in kinds else "state"]
        return self.reach.sees(torch.cat([before, bad["length"]], dim=-1))

    def with_zeros(self, function: Callable[..., Any]) -> Any:
        """The result from zeros in the place of what is not finite."""
        masks = {**self.bad, "state": self.bad["state"][..., 0]}
        zeros = {
            id(p.value): p.value.masked_fill(_on(masks[p.kind], p.value), 0)
            for p in self.parts
            if p.kind in masks
        }
        args, keywords = _each(lambda x: zeros.get(id(x), x), self._given)
        return function(*args, **keywords)

    def spoil_gradients(self, bad: Bool[Tensor, "*batch output"]) -> None:
        """Make NaN of the gradients of all that these outputs see, and of the weights."""
        before, slots = self.slots
        seen = self.reach.seen(bad, slots)
        masks = {
            "length": bad if any(p.kind == "slot" for p in self.parts) else seen[..., before:],
            "slot": seen,
            "past": seen[..., :before],
            "state": seen[..., 0],
        }
        for part in self.parts:
            part.value.spoil(masks.get(part.kind))


def _spoiled(result: Any, spoilt: Bool[Tensor, "*batch output"]) -> Any:
    """The outputs, and the states of rows whose last output is among these, as NaN.

    They are constants to the backward pass: what they depend on has no gradient through them.
    """

    def spoil(x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(_on(mask, x), torch.nan)

    if isinstance(result, Tensor):
        return spoil(result, spoilt)
    y, *after = result
    return spoil(y, spoilt), *pytree.tree_map_only(
        Tensor, lambda x: spoil(x, spoilt[..., -1]), after
    )


def _watch(call: _Call, y: Tensor, after: Sequence[Any]) -> None:
    """Contain gradients that are not finite."""

    def contain(gradient: Tensor | None, of_state: bool = False) -> Tensor | None:
        if gradient is None or _is_finite(gradient):
            return None
        axes = len(call.shape) - of_state
        wrong = ~gradient.isfinite()
        bad = wrong.flatten(axes).any(-1) if wrong.ndim > axes else wrong
        outputs = torch.zeros(call.reach.first.shape, dtype=torch.bool)
        outputs[... if axes == outputs.ndim else (..., -1)] = bad
        call.spoil_gradients(outputs)
        return gradient.masked_fill(_on(bad, gradient), 0)

    y.register_hook(contain)
    for leaf in pytree.tree_leaves(after):
        if isinstance(leaf, Tensor) and leaf.requires_grad and y.numel():
            leaf.register_hook(partial(contain, of_state=True))
