"""What the annotations of a public function of an op demand of its arguments and results.

Kernels read memory by the shapes that they get. So before a backend sees a call, every tensor has
the declared number of axes, axes of one name have one size, floats are real, all tensors are on one
device and have memory, and plain values have their type and range. Parts of named tuples are
checked by the annotations of their fields.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from operator import or_
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.errors import InputError
from stateline.ops.dispatch import PLAIN, tensors_of
from stateline.settings import Range, check_type

Rule = Callable[..., str]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BOOLEANS: tuple[torch.dtype, ...] = (torch.bool,)
INTEGERS: tuple[torch.dtype, ...] = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

Dropout = Annotated[float, Range("from 0, below 1", lambda number: 0 <= number < 1)]
"""Probability that a weight of attention is dropped."""


class Shape(NamedTuple):
    """The requirements of an annotation on one tensor.

    Attributes:
        text: The axes, as in the annotation: ``name``, ``#name`` (this size or 1), ``*name`` (any
            number of axes), ``_`` (any size) or a number.
        dtypes: Dtypes that it may have.
        optional: Whether ``None`` may stand in its place.
    """

    text: str
    dtypes: tuple[torch.dtype, ...]
    optional: bool


class Declaration:
    """The declared arguments and results of a function.

    Args:
        name: Its name.
        signature: Its parameters, without ``backend``, and its results.
        rules: Called with those arguments that they name after the shapes were found right; each
            returns what is wrong, or an empty string. They may depend on what belongs to the
            signature of a call (see :mod:`stateline.ops.bound`) alone.
        timeless: Whether parts of named tuples have no axis ``length``.
    """

    def __init__(
        self, name: str, signature: inspect.Signature, rules: tuple[Rule, ...], *, timeless: bool
    ) -> None:
        self.name, self.signature, self.rules, self._timeless = name, signature, rules, timeless
        self._annotations = {key: p.annotation for key, p in signature.parameters.items()}

    def check(self, *args: Any, **named: Any) -> None:
        """Raise an :class:`InputError` if the arguments do not fit the declaration."""
        values = self._bound(*args, **named)
        self._check_values(values, self._annotations)
        for rule in self.rules:
            if wrong := rule(**{name: values[name] for name in inspect.signature(rule).parameters}):
                raise InputError(f"{self.name}: {wrong}")
        if self.name.endswith("_"):
            refuse_lazy(self.name, [values[name] for name in ("state", "cache") if name in values])

    def check_result(self, result: Any, *args: Any, **named: Any) -> None:
        """Raise an :class:`InputError` if a backend returned something else than was declared."""
        values, annotations = self._bound(*args, **named), dict(self._annotations)
        returned = self.signature.return_annotation
        parts, kinds = (result,), (returned,)
        if get_origin(returned) is tuple:
            parts, kinds = result, get_args(returned)
            if not isinstance(result, tuple) or len(result) != len(kinds):
                raise InputError(f"{self.name} needs a backend that returns {len(kinds)} results")
        for number, (part, kind) in enumerate(zip(parts, kinds, strict=True), 1):
            if hasattr(kind, "dim_str") or hasattr(kind, "_fields"):
                name = f"result {number} of its backend"
                values[name], annotations[name] = part, kind
        self._check_values(values, annotations)
        self._check_precision(parts, (*args, *named.values()))

    def _check_precision(self, results: Iterable[Any], inputs: tuple[Any, ...]) -> None:
        """Results have a dtype of the inputs or of autocast, or float32 where one is narrower."""
        wanted = {x.dtype for x in tensors_of(inputs) if x.is_floating_point()}
        wanted |= {torch.float32} if wanted - {torch.float64} else set()
        for x in tensors_of(results):
            kind = x.device.type
            lowered = torch.is_autocast_enabled(kind) and x.dtype == torch.get_autocast_dtype(kind)
            if x.is_floating_point() and x.dtype not in wanted and not lowered:
                kinds = " or ".join(sorted(str(d)[6:] for d in wanted))
                raise InputError(
                    f"{self.name} needs a backend that returns {kinds} for these inputs, got "
                    f"{str(x.dtype)[6:]}"
                )

    def _bound(self, *args: Any, **named: Any) -> dict[str, Any]:
        bound = self.signature.bind(*args, **named)
        bound.apply_defaults()
        return bound.arguments

    def fields(self, kind: Any) -> dict[str, Any]:
        """Annotations of the parts of a named tuple."""
        parts: dict[str, Any] = kind.__annotations__
        return {k: without_time(v) for k, v in parts.items()} if self._timeless else parts

    def _check_values(self, values: Mapping[str, Any], annotations: Mapping[str, Any]) -> None:
        sizes: dict[str, Any] = {}
        device: torch.device | None = None
        for name, annotation, value in self._parts(values, annotations):
            shape = declared(annotation)
            if shape is None:
                check_type(self.name, name, value, annotation)
            elif value is not None or not shape.optional:
                self._check_tensor(name, value, shape, sizes)
                if device is not None and value.device != device:
                    raise InputError(
                        f"{self.name} needs all tensors on one device, got {name} on "
                        f"{value.device} and others on {device}"
                    )
                device = value.device

    def _check_tensor(self, name: str, value: Any, shape: Shape, sizes: dict[str, Any]) -> None:
        if not isinstance(value, Tensor):
            raise InputError(f"{self.name} needs a tensor {name}, got {type(value).__name__}")
        if value.dtype not in shape.dtypes:
            kinds = ", ".join(str(d).removeprefix("torch.") for d in shape.dtypes)
            raise InputError(
                f"{self.name} needs {name} of dtype {kinds}, got {str(value.dtype)[6:]}"
            )
        if value.layout is not torch.strided or value.is_nested:
            raise InputError(f"{self.name} needs {name} as a dense tensor: give {name}.to_dense()")
        if not fits(shape.text, tuple(value.shape), sizes):
            axes = ", ".join(shape.text.split())
            known = {a.strip("#*"): sizes.get(a.strip("#*")) for a in shape.text.split()}
            given = ", ".join(f"{k} = {_text(v)}" for k, v in known.items() if v is not None)
            raise InputError(
                f"{self.name} needs {name} of shape ({axes}), got {_text(tuple(value.shape))}"
                + (f", with {given}" if given else "")
            )
        if is_freed(value):
            raise InputError(
                f"{self.name} needs {name} with memory, got a tensor whose storage has been freed: "
                "make it anew"
            )

    def _parts(
        self, values: Mapping[str, Any], annotations: Mapping[str, Any], prefix: str = ""
    ) -> Iterator[tuple[str, Any, Any]]:
        """Name, annotation and value of each argument; of named tuples, of each field."""
        for name, value in values.items():
            kind = tuple_of(annotations[name])
            if kind is None:
                yield prefix + name, annotations[name], value
            elif isinstance(value, kind):
                yield from self._parts(value._asdict(), self.fields(kind), f"{prefix}{name}.")
            elif value is not None or NoneType not in options_of(annotations[name]):
                raise InputError(
                    f"{self.name} needs {prefix}{name} as a {kind.__name__} of "
                    f"({', '.join(kind._fields)}), got {type(value).__name__}"
                )


def refuse_lazy(function: str, states: Iterable[Any]) -> None:
    """Refuse to change states in place whose entries are negated lazily."""
    if any(x.is_neg() for x in tensors_of(states)):
        raise InputError(
            f"{function} needs a state that it can change, got the imaginary part of a conjugate, "
            "which is negated lazily: give state.resolve_neg()"
        )


def is_freed(x: Tensor) -> bool:
    """Whether a tensor has entries but no memory, as after ``x.untyped_storage().resize_(0)``."""
    if type(x) not in PLAIN or x.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return x.numel() > 0 and not x.data_ptr()


def without_time(annotation: Any, optional: bool = True) -> Any:
    """An annotation of tensors without their axis of time, and without ``None`` if not optional."""
    if hasattr(annotation, "dim_str"):
        axes = annotation.dim_str.split()
        return Float[Tensor, " ".join(axis for axis in axes if axis != "length")]
    if hasattr(annotation, "__origin__"):
        return annotation.__origin__[tuple(map(without_time, get_args(annotation)))]
    kinds = (kind for kind in options_of(annotation) if optional or kind is not NoneType)
    return reduce(or_, (without_time(k) if hasattr(k, "dim_str") else k for k in kinds))


def declared(annotation: Any) -> Shape | None:
    """The requirements of an annotation on a tensor; ``None`` if it is not about tensors."""
    options = options_of(annotation)
    found = next((kind for kind in options if hasattr(kind, "dim_str")), None)
    if found is None:
        return None
    names = {str(d) for d in found.dtypes}
    integers = tuple(d for d in INTEGERS if {str(d).removeprefix("torch.")} == names) or INTEGERS
    kinds = BOOLEANS if names & {"bool", "bool_"} else integers
    kinds = FLOATS if any(name.startswith("float") for name in names) else kinds
    return Shape(found.dim_str, kinds, type(None) in options)


def fits(text: str, shape: tuple[int, ...], sizes: dict[str, Any]) -> bool:
    """Whether a shape has the axes of a text; sizes of axes not seen before are added.

    Example:
        >>> sizes = {}
        >>> fits("*batch channel 2", (7, 5, 3, 2), sizes), sizes
        (True, {'batch': (7, 5), 'channel': 3})
        >>> fits("#channel", (1,), sizes), fits("channel", (1,), sizes)
        (True, False)
    """
    axes = text.split()
    many = next((i for i, axis in enumerate(axes) if axis.startswith("*")), None)
    if many is not None:
        extra = len(shape) - len(axes) + 1
        if extra < 0:
            return False
        batch = shape[many : many + extra]
        if sizes.setdefault(axes[many][1:], batch) != batch:
            return False
        axes, shape = axes[:many] + axes[many + 1 :], shape[:many] + shape[many + extra :]
    return len(axes) == len(shape) and all(map(_fits, axes, shape, [sizes] * len(axes)))


def _fits(axis: str, size: int, sizes: dict[str, Any]) -> bool:
    if axis.isdigit():
        return size == int(axis)
    if axis == "_" or (axis.startswith("#") and size == 1):
        return True
    return bool(sizes.setdefault(axis.lstrip("#"), size) == size)


def mixed(*inputs: Any) -> str:
    """The dtypes of tensors, also in tuples; an empty string if there is only one.

    Example:
        >>> mixed(torch.zeros(2), (torch.zeros(2).double(), None)), mixed(torch.zeros(2))
        ('float32 and float64', '')
    """
    found = sorted({str(x.dtype)[6:] for x in tensors_of(inputs)})
    return " and ".join(found) if len(found) > 1 else ""


def one_precision(needs: str, *tensors: Any) -> str:
    """Why tensors, also in tuples, are not all float32 or all float64, or an empty string.

    Example:
        >>> one_precision("cos and sin need", torch.zeros(2), torch.zeros(2).double())
        'cos and sin need one dtype, float32 or float64, got float32 and float64'
    """
    found = {str(x.dtype)[6:] for x in tensors_of(tensors)}
    if found <= {"float32"} or found <= {"float64"}:
        return ""
    return f"{needs} one dtype, float32 or float64, got {' and '.join(sorted(found))}"


def precise_weights(weights: Any) -> str:
    """Why the weights are not all float32 or all float64, or an empty string."""
    return one_precision("weights need", weights)


def tuple_of(annotation: Any) -> Any:
    """The named tuple that an annotation wants; ``None`` if it wants none."""
    kinds = (kind for kind in options_of(annotation) if isinstance(kind, type))
    return next((kind for kind in kinds if hasattr(kind, "_fields")), None)


def options_of(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    return (
        (annotation,) if hasattr(annotation, "dim_str") else get_args(annotation) or (annotation,)
    )


def _text(size: Any) -> str:
    """A shape as it is written in an error."""
    return f"({', '.join(map(str, size))})" if isinstance(size, tuple) else str(size)
