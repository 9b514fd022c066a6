"""Public functions of ops: each kind of call is checked once, and its kernel is kept.

The *signature* of a call is all that decides which kernel runs it, and whether it may: shapes,
dtypes, devices, layouts and flags of the tensors, plain values, gradient mode, autocast, and the
preferred backend. At the first call with a signature the arguments are checked against the
function's annotations (:mod:`stateline.ops.declared`), and a backend is chosen
(:mod:`stateline.ops.dispatch`). Later calls take one lookup. So checks, and the ``can_use`` and
``gains`` of backends, must depend on the signature alone, never on the numbers in a tensor.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from stateline.errors import InputError
from stateline.ops import dispatch as choice
from stateline.ops.declared import Declaration, Rule, refuse_lazy, without_time
from stateline.ops.dispatch import (
    PLAIN,
    choose,
    dispatch,
    own_precision,
    tensors_of,
    wants_tangent,
)
from stateline.ops.op import Op
from stateline.settings import check_kind

P = ParamSpec("P")
T = TypeVar("T")

Backend = Any
"""The argument ``backend`` of a public function: callers give a name, the body gets the kernel."""

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


def bound(
    op: Op, *rules: Rule, autocast: bool = True
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function a public function of an op.

    Its body calls its argument ``backend``, which is then the kernel of the chosen backend, with
    the arguments of the kernel; ``starts`` is given by name.

    Args:
        op: The op.
        *rules: What the annotations cannot say: see :class:`stateline.ops.declared.Declaration`.
        autocast: Whether autocast may lower the precision inside; not where rounding accumulates.

    Returns:
        The decorator. Under ``torch.compile`` nothing is checked or kept. It documents the
        arguments that many ops have, such as ``state``, and the error, where the docstring does
        not.

    Example:
        >>> from jaxtyping import Float
        >>> from stateline.ops import OPS, fft_conv
        >>> @bound(OPS["fft_conv"])
        ... def fft_conv(u: Float[Tensor, "1 length 1"], kernel: Float[Tensor, "1 taps"], *,
        ...              backend: Backend = "auto"):
        ...     return backend(u, kernel)
        >>> fft_conv(torch.ones(1, 3, 1), torch.ones(2, 2))
        Traceback (most recent call last):
        stateline.errors.InputError: fft_conv needs kernel of shape (1, taps), got (2, 2)
    """

    def decorate(body: Callable[P, T]) -> Callable[P, T]:
        run: Any = _public(op, body, inspect.signature(body), rules, autocast=autocast)
        run.__doc__ = _documented(body)
        return run

    return decorate


def step_of(op: Op, whole: Callable[P, T], *, autocast: bool = True) -> Callable[P, T]:
    """The public function of one step of a recurrence, made from that of whole sequences.

    Its arguments and results have no axis ``length``, and none of them may be omitted.
    """
    text = "One step of :func:`{}`: the output for the next token, and the state after it."
    return _step(op, whole, "_step", text, lambda result: result, autocast)


def step_in_place(op: Op, whole: Callable[P, tuple[T, Any]]) -> Callable[P, T]:
    """The public function of one step that returns the output alone and changes the state."""
    text = "One step of :func:`{}` without gradients: the state changes in place."
    return _step(op, whole, "_step_", text, lambda result: get_args(result)[0], True)


def _step(
    op: Op, whole: Any, ending: str, text: str, returned: Callable[[Any], Any], autocast: bool
) -> Callable[..., Any]:
    told = inspect.signature(whole)
    parameters = [
        p.replace(
            annotation=without_time(p.annotation, p.name != "state"),
            default="auto" if p.name == "backend" else p.empty,
        )
        for p in told.parameters.values()
        if p.name != "starts"
    ]
    result = without_time(returned(told.return_annotation))
    signature = inspect.Signature(parameters, return_annotation=result)

    def body(*inputs: Any, backend: Backend, **named: Any) -> Any:
        return backend(*(signature.bind(*inputs, **named).args if named else inputs))

    body.__name__ = body.__qualname__ = whole.__name__ + ending
    body.__module__ = whole.__module__
    text += "\n\nThe arguments are the same, without the axis of time; the state is required."
    body.__doc__ = text.format(whole.__name__)
    rules = whole.declared.rules
    return _public(op, body, signature, rules, autocast=autocast, timeless=True)


def _public(
    op: Op,
    body: Callable[..., Any],
    signature: inspect.Signature,
    rules: tuple[Rule, ...],
    *,
    autocast: bool,
    timeless: bool = False,
) -> Callable[..., Any]:
    others = [p for p in signature.parameters.values() if p.name != "backend"]
    declared = Declaration(
        body.__name__, signature.replace(parameters=others), rules, timeless=timeless
    )
    binder = _Binder(op, declared, body, body if autocast else own_precision(body))

    @wraps(body)
    def run(*args: Any, backend: str = "auto", **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return binder.traced(*args, backend=binder.choose(backend), **named)
        try:
            key: Any = (
                backend,
                choice.preference.get() or choice.from_environment(),
                torch.is_grad_enabled(),
                torch._C._is_any_autocast_enabled() and _autocast(),
                forward_ad._current_level,
                signature_of((*args, *named, *named.values()) if named else args),
            )
            kept = binder.kept.get(key)
        except (RuntimeError, TypeError):  # a tensor of a transform, or a value without a hash
            key = kept = None
        if kept is None:
            return binder.first(key, backend, args, named)
        return kept(*args, **named)

    binder.run = run
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            p.replace(annotation=str) if p.name == "backend" else p
            for p in signature.parameters.values()
        ]
    )
    run.declared = declared  # type: ignore[attr-defined]
    return run


class _Binder:
    """The calls of a function that were seen, by their signatures, and how a new one is seen.

    Args:
        op: The op.
        declared: The arguments of the function.
        body: See :func:`bound`.
        precise: The same without autocast, if that is not for this op.
    """

    run: Callable[..., Any]
    """The public function."""

    def __init__(
        self,
        op: Op,
        declared: Declaration,
        body: Callable[..., Any],
        precise: Callable[..., Any],
    ) -> None:
        self._op, self._declared, self._body, self.traced = op, declared, body, precise
        self.kept: dict[Any, Callable[..., Any]] = op.memories.setdefault(declared.name, {})

    def choose(self, backend: str) -> Callable[..., Any]:
        """A kernel that chooses the backend at every call."""
        return partial(dispatch, self._op, self._declared.name, backend)

    def first(self, key: Any, backend: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Check and run a call with a new signature, and keep its kernel."""
        check_kind("backend", backend, str, '"auto"')
        self._declared.check(*args, **named)
        try:
            call, result = self._bind(backend, args, named)
        except RuntimeError as error:
            if torch._C._functorch.peek_interpreter_stack() is None and not wants_tangent():
                raise
            raise InputError(
                f"the kernels of {self._declared.name} do not run under torch.vmap, torch.func and "
                'forward-mode derivatives: call it with stateline.ops.use_backend("reference"), '
                "which most ops allow, or give it the rows of all calls as one batch and take "
                "gradients with torch.autograd"
            ) from error
        if key is not None and not wants_tangent():
            if len(self.kept) >= REMEMBERED:
                self.kept.clear()
            self.kept[key] = call
        return result

    def _bind(
        self, backend: str, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Callable[..., Any], Any]:
        """What runs calls of this signature, and the result of this one."""
        if any(x.is_neg() for x in tensors_of((args, tuple(named.values())))):
            call: Callable[..., Any] = partial(self._resolved, backend)
            return call, call(*args, **named)
        kernel = _Choice(self._op, self._declared.name, backend)
        body = self.traced if torch._C._is_any_autocast_enabled() else self._body
        result = body(*args, backend=kernel, **named)
        call = partial(body, backend=kernel.run)
        if kernel.own:
            self._declared.check_result(result, *args, **named)
            call = partial(self._checked, call, signature_of((result,)))
        return call, result

    def _resolved(self, backend: str, *args: Any, **named: Any) -> Any:
        """Run a call with tensors that are negated lazily, as imaginary parts of conjugates are."""
        args, named = tree_map_only(Tensor, Tensor.resolve_neg, (args, named))
        return self.run(*args, backend=backend, **named)

    def _checked(
        self, call: Callable[..., Any], wanted: tuple[Any, ...], *args: Any, **named: Any
    ) -> Any:
        """Run a call on a backend of one's own: its results must be like those that were right."""
        result = call(*args, **named)
        if signature_of((result,)) != wanted:
            self._declared.check_result(result, *args, **named)
        return result


class _Choice:
    """A kernel that chooses the backend at its first call.

    Attributes:
        run: The kernel chosen.
        own: Whether its backend is not the package's.
    """

    run: Callable[..., Any]
    own: bool

    def __init__(self, op: Op, function: str, backend: str) -> None:
        self._op, self._function, self._backend = op, function, backend

    def __call__(self, *inputs: Any, **packed: Any) -> Any:
        given = (*inputs, *(x for x in packed.values() if x is not None))
        name = choose(self._op, self._function, self._backend, given)
        self.own = name in self._op.own
        candidate = getattr(self._op.candidates, self._function)[name]
        self.run = candidate.run
        if packed and not candidate.by_name:
            self.run = partial(_by_place, candidate.run)
        return self.run(*inputs, **packed)


def _by_place(run: Callable[..., Any], *inputs: Any, starts: Tensor | None) -> Any:
    """Run a kernel that takes ``starts`` as its last argument, or not at all."""
    return run(*inputs) if starts is None else run(*inputs, starts)


def signature_of(values: Iterable[Any]) -> tuple[Any, ...]:
    """All of some arguments that the choice of a kernel may depend on, but no number in a tensor.

    Of tensors, also in tuples: class, shape, dtype, device, gradient, lazy negation, layout, and
    whether there is memory. Plain values as they are.
    """
    key: list[Any] = []
    rest = list(values)
    for x in rest:
        kind = type(x)
        if kind in PLAIN or isinstance(x, Tensor):
            key += kind, x.shape, x.dtype, x.is_cpu or x.device, x.requires_grad, x.is_neg()
            key += x.is_contiguous() or x.stride(), kind in PLAIN and not x.data_ptr()
        elif isinstance(x, tuple):
            key += kind, len(x)
            rest += x
        else:
            key += kind, x
    return tuple(key)


def _autocast() -> tuple[Any, ...]:
    """For each kind of device, the dtype that autocast computes in."""
    kinds = ("cpu", "cuda", "mps", "xpu")
    return tuple(torch.is_autocast_enabled(k) and torch.get_autocast_dtype(k) for k in kinds)


def checked_step(
    step: Callable[..., T],
    function: Any,
    weights: tuple[Any, ...],
    arguments: Callable[..., tuple[Any, ...]],
) -> Callable[..., T]:
    """Prepared steps whose arguments are checked like the arguments of the function they replace.

    Args:
        step: ``step(*inputs)`` computes one token; the last input is the state, which changes.
        function: A public function.
        weights: The tensors that the steps are prepared from. Weights of the same signature share
            their passed checks, so preparing steps at every token is cheap.
        arguments: From the inputs of a step, the arguments of ``function``.
    """
    passed = _passed.setdefault((function, signature_of(weights)), set())

    def run(*inputs: Any) -> T:
        if not torch.compiler.is_compiling() and (key := signature_of(inputs)) not in passed:
            function.declared.check(*arguments(*inputs))
            refuse_lazy(function.__name__, inputs[-1:])
            passed.add(key)
        return step(*inputs)

    return run


_passed: dict[Any, set[Any]] = {}


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
