"""Which backend runs a call of an op.

Every op has a folder with one module per backend. ``reference`` is the definition: slow and easy to
verify. Every other backend must match it in outputs and gradients.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from logging import DEBUG, WARNING
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from stateline.errors import InputError, check_choice, unknown_name
from stateline.ops.op import OPS, Candidate, Op, log

P = ParamSpec("P")
T = TypeVar("T")

VARIABLE = "STATELINE_BACKEND"
"""Environment variable with the preferred backends."""

_OTHERS = ""
"""Key of the backend of all ops that a preference does not name."""

Preference = frozenset[tuple[str, str]]
"""Preferred backend of ops, as pairs."""

preference: ContextVar[Preference | None] = ContextVar("preference", default=None)
"""The present preference; ``None`` is that of the environment."""

_logged: set[tuple[str, ...]] = set()


def dispatch(
    op: Op, function: str, backend: str, *inputs: Any, starts: Tensor | None = None
) -> Any:
    """Run a call on the backend chosen for it, see :func:`choose`.

    ``starts``, where documents begin, is the last argument of backends that read packed rows.
    """
    inputs = inputs if starts is None else (*inputs, starts)
    name = choose(op, function, backend, inputs)
    return getattr(op.candidates, function)[name].run(*inputs)


def choose(op: Op, function: str, backend: str, inputs: tuple[Any, ...]) -> str:
    """The backend that runs a call.

    Args:
        op: The op.
        function: Name of its function, such as ``"diagonal_ssm_step"``.
        backend: A backend that must run the call, or ``"auto"``: the preferred one
            (:func:`use_backend`, environment) if it can, else the first one that can and gains.
        inputs: Arguments of the call.

    Raises:
        InputError: If the op has no backend of that name, or it cannot run this call.
    """
    _prepare(op.name, function)
    candidates = getattr(op.candidates, function)
    if backend == "auto":
        name = _choose(op, candidates, function, inputs)
    else:
        name = _require(op, candidates, backend, function, inputs)
    _log_once(DEBUG, "%s runs on backend %r", function, name)
    return name


@contextmanager
def use_backend(name: str | None = None, /, **ops: str) -> Iterator[None]:
    """Prefer a backend inside the ``with`` block, for all ops or for some.

    Calls that it cannot run go to the backend that ``auto`` chooses; the logger ``stateline.ops``
    says so once. The preference holds for the current :mod:`contextvars` context, so not for other
    threads. A compiled function keeps the backends that were chosen when it was compiled. Outside
    of such blocks, the environment variable ``STATELINE_BACKEND`` counts: ``numba``, or
    ``diagonal_ssm=reference,attention=torch``.

    Args:
        name: Backend of all ops; ``"auto"`` ends a preference, ``None`` leaves it as it is.
        **ops: Backend of single ops.

    Raises:
        InputError: If there is no such op, if no op has a backend ``name``, or if an op does not
            have the backend given for it.

    Example:
        >>> import torch
        >>> from stateline.ops import fft_conv
        >>> with use_backend("reference"):
        ...     fft_conv(torch.ones(1, 3, 1), torch.ones(1, 2)).flatten().tolist()
        [1.0, 2.0, 2.0]
        >>> with use_backend(fft_conv="reference", attention="torch"):
        ...     fft_conv(torch.ones(1, 3, 1), torch.ones(1, 2)).flatten().tolist()
        [1.0, 2.0, 2.0]
    """
    before = (preference.get() or from_environment()) if name is None else frozenset()
    token = preference.set(_resolve(name, ops, before))
    try:
        yield
    finally:
        preference.reset(token)


PLAIN = (Tensor, torch.nn.Parameter)
"""Classes of tensors that are no instance of a subclass, as sharded parameters are."""


def wants_gradient(*inputs: Any) -> bool:
    """True if autograd records a call with these inputs."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of(inputs))


def wants_tangent() -> bool:
    """True inside ``torch.autograd.forward_ad.dual_level``: tensors may carry tangents."""
    return forward_ad._current_level >= 0


def tensors_of(inputs: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, also inside named tuples."""
    for x in inputs:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from tensors_of(x)


def own_precision(op: Callable[P, T]) -> Callable[P, T]:
    """Disable autocast inside an op whose rounding accumulates: it chooses its own precision."""

    @wraps(op)
    def run(*inputs: P.args, **keywords: P.kwargs) -> T:
        first = next(tensors_of((*inputs, *keywords.values())), None)
        device = "meta" if first is None else first.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return op(*inputs, **keywords)
        with torch.autocast(device, enabled=False):
            return op(*inputs, **keywords)

    return run


def _choose(
    op: Op, candidates: Mapping[str, Candidate], function: str, inputs: tuple[Any, ...]
) -> str:
    """The preferred backend if it can run the call, else the first one that can and gains.

    If none gains, the first one that can: rows of several documents leave no choice.
    """
    wanted = preferred(op.name)
    if wanted != "auto":
        reason = f"{op.name} has no such backend"
        if wanted in candidates:
            reason = candidates[wanted].reason(function, *inputs)
        if not reason:
            return wanted
        text = "%s cannot run on backend %r: %s; auto chooses"
        _log_once(WARNING, text, function, wanted, reason)
    able = ""
    for name, candidate in candidates.items():
        if candidate.reason(function, *inputs):
            continue
        if candidate.gains is None or candidate.gains(function, *inputs):
            return name
        able = able or name
    if not able:
        raise InputError(f"no backend of {op.name} can run this call of {function}")
    return able


def _require(
    op: Op,
    candidates: Mapping[str, Candidate],
    backend: str,
    function: str,
    inputs: tuple[Any, ...],
) -> str:
    """The backend asked for by the caller, or an error."""
    if backend not in candidates:
        raise unknown_name(f"backend of {op.name}", backend, [*candidates, "auto"])
    if reason := candidates[backend].reason(function, *inputs):
        raise InputError(
            f"backend {backend!r} cannot run this call of {function}: {reason}; "
            "leave the choice to backend='auto'"
        )
    return backend


def _resolve(name: str | None, ops: Mapping[str, str], before: Preference) -> Preference:
    """Preferred backends by op, whether the op has it or not; read by :func:`preferred`."""
    if name not in (None, "auto") and not any(name in op.backends for op in OPS.values()):
        known = {backend for op in OPS.values() for backend in op.backends} | {"auto"}
        raise unknown_name("backend", str(name), known)
    for op, own in ops.items():
        check_choice("op", op, OPS)
        check_choice(f"backend of {op}", own, [*OPS[op].backends, "auto"])
    others = {} if name is None else {_OTHERS: name}
    return frozenset({**dict(before), **others, **ops}.items())


@cache
def from_environment() -> Preference:
    """The preference of the environment."""
    text = os.environ.get(VARIABLE, "")
    words = [word.strip() for word in text.split(",") if word.strip()]
    general = [word for word in words if "=" not in word] or ["auto"]
    if len(general) > 1:
        raise InputError(f"{VARIABLE} can name only one backend for all ops, got {text!r}")
    pairs = (word.partition("=") for word in words if "=" in word)
    try:
        return _resolve(general[0], {op.strip(): own.strip() for op, _, own in pairs}, frozenset())
    except InputError as error:
        raise InputError(f"{VARIABLE}={text}: {error}") from None


def once_per_trace(function: Callable[P, T]) -> Callable[P, T]:
    """Let ``torch.compile`` run a function that it cannot trace, and take its result as constant.

    It cannot trace context variables, imports and logging. ``torch.compiler`` sets the same mark in
    ``assume_constant_result``, but that would import the compiler, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@once_per_trace
def _prepare(op: str, function: str) -> None:
    if not hasattr(OPS[op].candidates, function):
        OPS[op].prepare(function)


@once_per_trace
def preferred(op: str) -> str:
    """The backend of an op that is preferred where it can run, or ``"auto"``."""
    wanted = dict(preference.get() or from_environment())
    return wanted.get(op, wanted[_OTHERS])


@once_per_trace
def kernels_run(op: Op, device_type: str) -> bool:
    """Whether calls on a device go to the kernels of an op, if these can run them.

    Layers ask this because on other backends, resetting the state at each document takes longer
    than cutting the documents out.
    """
    backend = {"cpu": "numba", "cuda": "triton"}.get(device_type)
    usable = backend in op.backends and not op.module(backend)[1]
    return usable and preferred(op.name) in ("auto", backend)


@once_per_trace
def _log_once(level: int, text: str, *values: str) -> None:
    if (text, *values) not in _logged:
        _logged.add((text, *values))
        log.log(level, text, *values)
