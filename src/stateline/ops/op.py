"""The table of ops and their backends."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from logging import getLogger
from sys import maxsize
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stateline.errors import InputError, check_choice
from stateline.ops.stepping import copying, on_a_copy
from stateline.settings import check_kind

GROUP = "stateline.backends"
"""Entry-point group of installed packages: the name is ``op.backend``, the object its module."""

PACKAGES = {
    "numba": "numba",
    "triton": "triton",
    "fla": "flash-linear-attention",
    "mamba_ssm": "mamba-ssm",
}
"""What to install for each optional module."""

log = getLogger("stateline.ops")


class Candidate(NamedTuple):
    """One function of one backend."""

    run: Any
    can_use: Callable[..., str] | None
    gains: Callable[..., bool] | None
    unavailable: str
    """Why it never runs on this machine; "" if it may."""
    most: int
    """Largest number of arguments: one fewer if the function does not take ``starts``."""
    by_name: bool
    """Whether it takes ``starts`` by name."""

    def reason(self, function: str, *inputs: Any) -> str:
        """Why it cannot run this call; "" if it can."""
        if not self.unavailable and len(inputs) > self.most:
            return "it reads no packed rows"
        if self.unavailable or self.can_use is None:
            return self.unavailable
        return self.can_use(function, *inputs)


def _function(module: Any, name: str) -> Any:
    """A function of a backend. A step in place also gives the step on a copy, and the reverse."""
    run = getattr(module, name, None)
    if run is None and name.endswith("_step_") and (step := getattr(module, name[:-1], None)):
        return copying(step)
    if run is None and name.endswith("_step") and (step_ := getattr(module, f"{name}_", None)):
        return on_a_copy(step_)
    return run


def _most_arguments(run: Any) -> tuple[int, bool]:
    """Largest number of arguments, and whether ``starts`` is one of them."""
    found = signature(run).parameters
    several = any(p.kind is p.VAR_POSITIONAL for p in found.values())
    return maxsize if several else len(found), "starts" in found


def _unlike(run: Any, defined: Any) -> str:
    """Why a function cannot take the arguments of the definition; "" if it can."""
    (most, packed), (all_, also) = _most_arguments(run), _most_arguments(defined)
    wanted = all_ - also
    if most == maxsize or most - packed == wanted:
        return ""
    return f"its function takes {most - packed} arguments besides starts, the definition {wanted}"


def _why(error: Exception) -> str:
    """Why an import failed, in one line, with the way out if a package is missing."""
    missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    package = missing.partition(".")[0]
    if package in PACKAGES:
        return f"{package} is not installed: pip install {PACKAGES[package]}"
    return " ".join(str(error).split())


class Sizes(NamedTuple):
    """How large an example call of an op is.

    Attributes:
        batch: Rows.
        length: Positions of a row.
        d_model: Channels, a multiple of the width of a head.
        device: Where the tensors are.
        dtype: Of signals; parameters and states are at least float32.
    """

    batch: int
    length: int
    d_model: int
    device: torch.device
    dtype: torch.dtype = torch.float32

    @property
    def positions(self) -> int:
        """Positions times channels."""
        return self.batch * self.length * self.d_model

    @property
    def precise(self) -> torch.dtype:
        """Dtype of parameters and states."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def heads(self) -> tuple[int, int]:
        """Number and width of the heads: 64 entries, or all channels if there are fewer."""
        count = max(1, self.d_model // 64)
        return count, self.d_model // count

    def signal(self, *shape: int) -> Tensor:
        """Random signal (batch, length, *shape).

        By default, it has ``d_model`` channels; on a GPU with adjacent times, as in layers.
        """
        if not shape and self.device.type == "cuda":
            adjacent = torch.randn(self.batch, self.d_model, self.length, device=self.device)
            return adjacent.mT.to(self.dtype)
        x = torch.randn(self.batch, self.length, *(shape or (self.d_model,)), device=self.device)
        return x.to(self.dtype)

    def weight(self, *shape: int) -> Tensor:
        """Random parameter or state."""
        return torch.randn(shape, dtype=self.precise, device=self.device)


class Example(NamedTuple):
    """A call of an op as a layer makes it, on whole sequences.

    Attributes:
        inputs: Arguments, as its function and its backends take them.
        flops: Operations of the cheapest known algorithm (multiply-add is two).
        function: Name of the function, if it is not the name of the op.
    """

    inputs: tuple[Any, ...]
    flops: float
    function: str = ""


class Op:
    """An op and its backends, in the order in which ``auto`` prefers them.

    A backend is a module with functions of the op's names. It may define three more functions.
    Two return "" or the reason: ``available() -> str``, why it cannot run on this machine, and
    ``can_use(function, *inputs) -> str``, why it cannot run this call (device, dtype, shape,
    gradient). The third, ``gains(function, *inputs) -> bool``, says whether it runs the call faster
    than the backends after it. Their answers are kept for calls of the same signature (see
    :mod:`stateline.ops.bound`). A new op adds itself to :data:`OPS`.

    Args:
        package: The op's folder as a package; it is called like the op and its main function.
        backends: Names of the backends that are preferred to ``torch`` (``pytorch.py`` in the
            folder) and ``reference`` (``reference.py``), which every op has. The module of another
            one is ``NAME_backend.py``.
        example: Makes a typical call for benches, tests and ``stateline check --backends``.

    Attributes:
        candidates: For each function that was called, by its name, the backends in order. A
            namespace: ``torch.compile`` would keep a dictionary as it was at the first read.
        memories: For each function, its kernels by the signatures of calls.
        own: Names of the backends that are not the package's, whose results are checked.
    """

    def __init__(
        self, package: str, backends: Sequence[str], example: Callable[[Sizes], Example]
    ) -> None:
        self.name, self.example, self._package = package.rpartition(".")[2], example, package
        self._sources: dict[str, object] = {name: f"{package}.{name}_backend" for name in backends}
        self._sources |= {"torch": f"{package}.pytorch", "reference": f"{package}.reference"}
        self._modules: dict[str, tuple[Any, str]] = {}
        self.memories: dict[str, dict[Any, Any]] = {}
        self.own: set[str] = set()
        self.candidates = SimpleNamespace()
        OPS[self.name] = self

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of all backends, available or not."""
        _add_installed()
        return tuple(self._sources)

    def functions(self) -> list[str]:
        """Names of the op's public functions, which a backend may define."""
        named = vars(import_module(self._package)).items()
        return [n for n, f in named if hasattr(f, "declared") and f.__module__ == self._package]

    def module(self, backend: str) -> tuple[Any, str]:
        """The module of a backend, imported when first needed, and why it is not available."""
        if backend not in self._modules:
            try:
                module = _load(self._sources[backend])
                available = getattr(module, "available", None)
                self._modules[backend] = module, available() if available else ""
            except Exception as error:  # an optional package may raise anything
                self._modules[backend] = None, f"import failed: {_why(error)}"
        return self._modules[backend]

    def prepare(self, function: str) -> None:
        """Import the backends, and look up a function in them before its first call."""
        found = {}
        for name in self.backends:
            module, reason = self.module(name)
            run = _function(module, function)
            if run is None and not reason:
                reason = f"it has no {function}"
            if name in self.own and run is not None and not reason:
                defined = _function(self.module("reference")[0], function)
                reason = _unlike(run, defined)
            takes = (0, False) if run is None or reason else _most_arguments(run)
            can_use, gains = (getattr(module, of, None) for of in ("can_use", "gains"))
            found[name] = Candidate(run, can_use, gains, reason, *takes)
        setattr(self.candidates, function, found)

    def reasons(self, function: str, *inputs: Any) -> dict[str, str]:
        """For each backend, in order, why it cannot run this call; "" if it can."""
        self.prepare(function)
        found = getattr(self.candidates, function).items()
        return {name: candidate.reason(function, *inputs) for name, candidate in found}

    def add(self, backend: str, source: object, before: str) -> None:
        """Insert a backend before another one, in the order of preference.

        Raises:
            InputError: See :func:`stateline.register_backend`.
        """
        check_kind("name", backend, str, "'mine'")
        names = list(self._sources)
        if backend in (*names, "auto"):
            raise InputError(f"{self.name} already has a backend {backend!r}: choose another name")
        check_choice(f"backend of {self.name}", before, names)
        if not isinstance(source, str | EntryPoint):  # the others are imported when needed
            functions = [n for n in self.functions() if _function(source, n) is not None]
            wrong = [n for n in functions if not callable(getattr(source, n, len))]
            if not functions or wrong:
                told = f", whose {wrong[0]} cannot be called" if wrong else ""
                raise InputError(
                    f"the backend {backend!r} of {self.name} needs a function of these names: "
                    f"{', '.join(self.functions())}, got a {type(source).__name__}{told}"
                )
        self.own.add(backend)
        names.insert(names.index(before), backend)
        self._sources[backend] = source
        self._sources = {name: self._sources[name] for name in names}
        self.forget()

    def remove(self, backend: str) -> None:
        """Undo :func:`stateline.register_backend`.

        Raises:
            InputError: If there is no such backend of your own.
        """
        if backend not in self.own:
            added = ", ".join(sorted(self.own)) or "none"
            raise InputError(f"{self.name} has no own backend {backend!r}: registered are {added}")
        self.own.remove(backend)
        del self._sources[backend]
        self._modules.pop(backend, None)
        self.forget()

    def forget(self) -> None:
        """Look up backends, and choose kernels, anew."""
        self.candidates = SimpleNamespace()
        for memory in self.memories.values():
            memory.clear()


OPS: dict[str, Op] = {}
"""All ops by name."""


def register_backend(op: str, name: str, module: object, *, before: str = "torch") -> None:
    """Add a backend of your own to an op.

    An installed package can do so without being imported first: by an entry point of the group
    ``stateline.backends`` whose name is ``op.backend`` and whose object is the module.

    Args:
        op: Name of the op, such as ``"diagonal_ssm"``.
        name: Name of the new backend.
        module: A module, its dotted name (imported when first needed), or any object that has the
            functions as attributes. See :class:`stateline.ops.op.Op` for what it can define; calls
            of functions that it does not define go to the other backends.
        before: The backend in front of which it stands in the order of preference.

    Raises:
        InputError: If there is no such op, if the op already has a backend of this name, if it has
            none called ``before``, or if the module has none of the op's functions.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from stateline.ops import fft_conv
        >>> def silence(u, kernel):
        ...     return torch.zeros(*u.shape[:-1], len(kernel))
        >>> register_backend("fft_conv", "silent", SimpleNamespace(fft_conv=silence))
        >>> fft_conv(torch.ones(1, 3, 1), torch.ones(1, 2)).flatten().tolist()
        [0.0, 0.0, 0.0]
        >>> OPS["fft_conv"].remove("silent")
    """
    check_choice("op", op, OPS)
    _add_installed()
    OPS[op].add(name, module, before)


@cache
def _add_installed() -> None:
    """Add the backends of installed packages, without importing them."""
    for entry in entry_points(group=GROUP):
        op, _, name = entry.name.partition(".")
        try:
            check_choice("op", op, OPS)
            OPS[op].add(name, entry, before="torch")
        except InputError as error:
            log.warning("entry point %r of %s is ignored: %s", entry.name, GROUP, error)


def _load(source: object) -> object:
    if isinstance(source, EntryPoint):
        return source.load()
    return import_module(source) if isinstance(source, str) else source
