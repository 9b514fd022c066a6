"""The public functions of ops: their checks, and the steps that follow from them.

Kernels read memory by the shapes that they get. So a public function of an op checks its
arguments before a backend sees them: every tensor has the declared number of axes, axes of one name
have one size, floats are real, and all tensors are on one device. Parts of named tuples are checked
by the annotations of their fields. A combination of shapes, dtypes and devices that has passed is
remembered, and costs about a microsecond when it comes again. Where a backend of one's own is
registered, results are checked in the same way.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import reduce, wraps
from operator import or_
from types import NoneType
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_args, get_origin

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.errors import InputError
from stateline.ops.dispatch import dispatch, tensors_of
from stateline.ops.op import OWN, Op

P = ParamSpec("P")
T = TypeVar("T")
Rule = Callable[..., str]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BOOLEANS: tuple[torch.dtype, ...] = (torch.bool,)
INTEGERS: tuple[torch.dtype, ...] = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_PLAIN = (int, float, str, type(None))

REMEMBERED = 4096
"""Signatures that a function remembers before it forgets all of them."""

_ARGUMENTS = {
    "x": "Signals.",
    "u": "Input signal.",
    "weights": "Weights.",
    "state": """State before the first token, at least float32; ``None`` is the zero state.""",
    "starts": """True where a document begins, whose state before it is zero: see
        :meth:`stateline.layers.SequenceLayer.forward`.""",
    "backend": """Backend that must run the call; ``"auto"`` chooses one.""",
}
"""Meaning of the arguments that many ops have."""

_RAISES = "\n\nRaises:\n    InputError: If a shape, a dtype or a device does not fit the others."


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


def door(*rules: Rule) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Check the arguments of a public function of an op.

    Args:
        *rules: Called with the arguments after the shapes were found right; each returns what is
            wrong, or an empty string. They may depend on shapes, dtypes and plain values alone.

    Returns:
        The decorator. Under ``torch.compile`` nothing is checked. It documents the arguments that
        many ops have, such as ``state``, and the error, where the docstring does not.

    Example:
        >>> from jaxtyping import Float
        >>> @door()
        ... def scaled(x: Float[Tensor, "batch channel"], gain: Float[Tensor, " channel"]):
        ...     return x * gain
        >>> scaled(torch.ones(2, 3), torch.ones(4))
        Traceback (most recent call last):
        stateline.errors.InputError: scaled needs gain of shape (channel), got (4), with channel = 3
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        run = _checked(function, Check(function, rules))
        run.__doc__ = _documented(function)
        return run

    return decorate


def _checked(function: Callable[P, T], check: "Check") -> Callable[P, T]:
    @wraps(function)
    def run(*args: P.args, **keywords: P.kwargs) -> T:
        if not torch.compiler.is_compiling():
            check(*args, **keywords)
        result = function(*args, **keywords)
        if not torch.compiler.is_compiling() and OWN:
            check.check_result(result, *args, **keywords)
        return result

    run.check = check  # type: ignore[attr-defined]
    return run


def _documented(function: Callable[..., Any]) -> str:
    """The docstring of a function with the arguments and the error that many ops have."""
    text, own = inspect.getdoc(function) or "", inspect.signature(function).parameters
    missing = (name for name in _ARGUMENTS if name in own and f"\n    {name}: " not in text)
    more = "".join(f"\n    {name}: {_ARGUMENTS[name]}" for name in missing)
    begins, returns, rest = text.partition("\n\nReturns:")
    if "\n\nArgs:" not in begins:
        more = f"\n\nArgs:{more}"
    result, example, others = rest.partition("\n\nExample:")
    return begins + more + returns + result + _RAISES * ("Raises:" not in text) + example + others


def checked_step(
    step: Callable[..., T],
    function: Any,
    weights: tuple[Any, ...],
    arguments: Callable[..., tuple[Any, ...]],
) -> Callable[..., T]:
    """Prepared steps whose arguments are checked like the arguments of the function they replace.

    Args:
        step: ``step(*inputs)`` computes one token.
        function: A function decorated with :func:`door`.
        weights: The tensors that the steps are prepared from. Weights of the same shapes share
            their passed checks, so preparing steps at every token is cheap.
        arguments: From the inputs of a step, the arguments of ``function``.
    """
    passed: set[Any] = function.check.steps.setdefault(signature_of(weights), set())

    def run(*inputs: Any) -> T:
        if not torch.compiler.is_compiling() and (key := signature_of(inputs)) not in passed:
            function.check(*arguments(*inputs))
            passed.add(key)
        return step(*inputs)

    return run


def step_of(op: Op, whole: Callable[P, T]) -> Callable[P, T]:
    """The public function of one step of a recurrence, made from that of whole sequences.

    Its arguments and results have no axis ``length``, and none of them may be omitted.
    """
    text = "One step of :func:`{}`: the output for the next token, and the state after it."
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
            annotation=without_time(p.annotation, p.name != "state"),
            default="auto" if p.name == "backend" else p.empty,
        )
        for p in declared.parameters.values()
        if p.name != "starts"
    ]
    result = without_time(returned(declared.return_annotation))
    signature = inspect.Signature(parameters, return_annotation=result)

    def run(*inputs: Any, backend: str = "auto", **named: Any) -> Any:
        if named:
            inputs = signature.bind(*inputs, **named).args
        return dispatch(op, name, *inputs, backend=backend)

    run.__name__ = run.__qualname__ = name
    run.__module__ = whole.__module__
    text += "\n\nThe arguments are the same, without the axis of time; the state is required."
    run.__doc__ = text.format(whole.__name__)
    run.__signature__ = signature  # type: ignore[attr-defined]
    return _checked(run, Check(run, whole.check.rules, timeless=True))


def without_time(annotation: Any, optional: bool = True) -> Any:
    """An annotation of tensors without their axis of time, and without ``None`` if not optional."""
    if hasattr(annotation, "dim_str"):
        axes = annotation.dim_str.split()
        return Float[Tensor, " ".join(axis for axis in axes if axis != "length")]
    if hasattr(annotation, "__origin__"):
        return annotation.__origin__[tuple(map(without_time, get_args(annotation)))]
    kinds = (kind for kind in options_of(annotation) if optional or kind is not NoneType)
    return reduce(or_, (without_time(k) if hasattr(k, "dim_str") else k for k in kinds))


class Check:
    """The declared arguments of a function, and the signatures that have passed.

    Args:
        function: The function.
        rules: See :func:`door`.
        timeless: Whether parts of named tuples have no axis ``length``.
    """

    def __init__(
        self, function: Callable[..., Any], rules: tuple[Rule, ...], *, timeless: bool = False
    ) -> None:
        self.name, self._timeless = function.__name__, timeless
        told = inspect.unwrap(function, stop=lambda f: hasattr(f, "__signature__"))
        self.signature = inspect.signature(told)
        self.rules = rules
        self.passed: set[Any] = set()
        self.steps: dict[Any, set[Any]] = {}  # signatures of prepared steps, by their weights

    def __call__(self, *args: Any, **keywords: Any) -> None:
        """Raise an :class:`InputError` if the arguments do not fit the declaration."""
        key = signature_of(args)
        if keywords:
            key = *key, *keywords, *signature_of(keywords.values())
        if key in self.passed:
            return
        values, annotations = self._bound(*args, **keywords)
        self._check_shapes(values, annotations)
        for rule in self.rules:
            wanted = inspect.signature(rule).parameters
            if wrong := rule(**{name: values[name] for name in wanted}):
                raise InputError(f"{self.name}: {wrong}")
        self._remember(key)

    def _remember(self, key: Any) -> None:
        if len(self.passed) >= REMEMBERED:
            self.passed.clear()
        self.passed.add(key)

    def check_result(self, result: Any, *args: Any, **keywords: Any) -> None:
        """Raise an :class:`InputError` if a backend returned something else than was declared."""
        key = signature_of((result, args, *keywords, *keywords.values()))
        if key in self.passed:
            return
        values, annotations = self._bound(*args, **keywords)
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
        self._check_shapes(values, annotations)
        self._remember(key)

    def _bound(self, *args: Any, **keywords: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments and annotations by name."""
        bound = self.signature.bind(*args, **keywords)
        bound.apply_defaults()
        annotations = {name: p.annotation for name, p in self.signature.parameters.items()}
        return bound.arguments, annotations

    def fields(self, kind: Any) -> dict[str, Any]:
        """Annotations of the parts of a named tuple."""
        parts: dict[str, Any] = kind.__annotations__
        return {k: without_time(v) for k, v in parts.items()} if self._timeless else parts

    def _check_shapes(self, values: dict[str, Any], annotations: dict[str, Any]) -> None:
        sizes: dict[str, Any] = {}
        device: torch.device | None = None
        for name, annotation, value in self._tensors(values, annotations):
            shape = declared(annotation)
            if shape is None or (value is None and shape.optional):
                continue
            if not isinstance(value, Tensor):
                raise InputError(f"{self.name} needs a tensor {name}, got {type(value).__name__}")
            if value.dtype not in shape.dtypes:
                kinds = ", ".join(str(d).removeprefix("torch.") for d in shape.dtypes)
                raise InputError(
                    f"{self.name} needs {name} of dtype {kinds}, got {str(value.dtype)[6:]}"
                )
            if not fits(shape.text, tuple(value.shape), sizes):
                axes = ", ".join(shape.text.split())
                known = {a.strip("#*"): sizes.get(a.strip("#*")) for a in shape.text.split()}
                given = ", ".join(f"{k} = {_text(v)}" for k, v in known.items() if v is not None)
                raise InputError(
                    f"{self.name} needs {name} of shape ({axes}), got {_text(tuple(value.shape))}"
                    + (f", with {given}" if given else "")
                )
            if device is not None and value.device != device:
                raise InputError(
                    f"{self.name} needs all tensors on one device, got {name} on {value.device} "
                    f"and others on {device}"
                )
            device = value.device

    def _tensors(
        self, values: Mapping[str, Any], annotations: Mapping[str, Any], prefix: str = ""
    ) -> Iterator[tuple[str, Any, Any]]:
        """Name, annotation and value of each argument; of named tuples, of each field."""
        for name, value in values.items():
            options = options_of(annotations[name])
            kind = next((k for k in options if hasattr(k, "_fields")), None)
            if kind is None:
                yield prefix + name, annotations[name], value
            elif isinstance(value, kind):
                yield from self._tensors(value._asdict(), self.fields(kind), f"{prefix}{name}.")
            elif value is not None or type(None) not in options:
                raise InputError(
                    f"{self.name} needs {prefix}{name} as a {kind.__name__} of "
                    f"({', '.join(kind._fields)}), got {type(value).__name__}"
                )


def signature_of(values: Any) -> tuple[Any, ...]:
    """Shapes, dtypes and devices of tensors, also in tuples, with their types; other values."""
    key: list[Any] = []
    for x in values:
        if isinstance(x, Tensor):
            key += (x.shape, x.dtype, x.is_cpu or x.device)  # is_cpu is found sooner
        elif isinstance(x, tuple):
            key += (type(x), signature_of(x))
        else:
            key.append(x if isinstance(x, _PLAIN) else id(x))
    return tuple(key)


def declared(annotation: Any) -> Shape | None:
    """The requirements of an annotation on a tensor; ``None`` if it is not about tensors."""
    options = options_of(annotation)
    found = next((kind for kind in options if hasattr(kind, "dim_str")), None)
    if found is None:
        return None
    names = {str(d) for d in found.dtypes}
    kinds = BOOLEANS if names & {"bool", "bool_"} else INTEGERS
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


def options_of(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    return (
        (annotation,) if hasattr(annotation, "dim_str") else get_args(annotation) or (annotation,)
    )


def _text(size: Any) -> str:
    """A shape as it is written in an error."""
    return f"({', '.join(map(str, size))})" if isinstance(size, tuple) else str(size)
