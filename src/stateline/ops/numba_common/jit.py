"""The decorator of all kernels: compiled once per machine, kept on disk."""

# mypy: ignore-errors

import hashlib
import inspect
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite.binding import Linkage
from numba.core import caching, codegen, compiler, event

_log = logging.getLogger("stateline")


@cache
def _sources(file: str) -> str:
    """Hash of the file of a kernel and of those of ``ops`` that it imports, one by one.

    Numba notices changes in a kernel's own file only, not in the functions that it calls.
    """
    package, found, left = Path(__file__).parents[3], {}, [Path(file)]
    while left:
        path = left.pop()
        if path not in found and path.is_file():
            found[path] = path.read_bytes()
            names = re.findall(rb"^from (stateline\.ops\.[\w.]+) import", found[path], re.MULTILINE)
            left += [package / f"{name.decode().replace('.', '/')}.py" for name in names]
    return hashlib.sha256(b"".join(found[path] for path in sorted(found))).hexdigest()


def _stamped(locator: type) -> type:
    """A place for compiled kernels, which are compiled again if one of their sources changes."""
    stamp = {"get_source_stamp": lambda self: _sources(self._py_file)}
    return type(locator.__name__, (locator,), stamp)


class _Files(caching.CompileResultCacheImpl):
    _locator_classes = (
        _stamped(caching.UserProvidedCacheLocator),
        _stamped(caching.InTreeCacheLocator),
        _stamped(caching.UserWideCacheLocator),
    )


class _Cache(caching.FunctionCache):
    """Compiled kernels on disk: unreadable files are compiled again, a full disk is no error."""

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # any error of unpickling an empty or cut file
            _log.info(
                "compiled again: the CPU kernels in %s are damaged: %r", self.cache_path, error
            )
            with suppress(OSError):
                self.flush()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _say_not_kept(f"cannot write {self.cache_path}: {error.strerror}")


class _Library(codegen.JITCodeLibrary):
    """The code of a kernel, which calls its own copies of the kernels that it uses.

    Otherwise all kernels would call the copy that belongs to the kernel loaded first. Copies may
    differ in which products and sums are fused. Results would then depend on the order of calls,
    and a process that compiles kernels would differ from a process that loads them from disk.
    """

    def _finalize_final_module(self) -> None:
        self._finalized = True  # lets the next line copy the code that other kernels link
        self._get_module_for_linking()
        for function in self._final_module.functions:
            if function.linkage == Linkage.linkonce_odr:
                function.linkage = "internal"
        super()._finalize_final_module()


class _Compiler(compiler.Compiler):
    """Compiles into a :class:`_Library`."""

    def __init__(self, typing, target, _, *others: Any) -> None:
        library = _Library(target.codegen(), "kernel")
        library.enable_object_caching()
        super().__init__(typing, target, library, *others)


class _SayOnce(event.Listener):
    """Logs one line when the first kernel is compiled."""

    said = False

    def on_start(self, event: Any) -> None:
        dispatcher = event.data["dispatcher"]
        if not self.said and dispatcher.py_func.__module__.startswith("stateline.ops."):
            self.said = True
            _log.warning("compiling new CPU kernels, kept on disk: this can take a minute")

    def on_end(self, event: Any) -> None:
        """Nothing to do."""


event.register("numba:compile", _SayOnce())


@cache
def _say_not_kept(reason: str) -> None:
    _log.info("CPU kernels are compiled again in every process: %s", reason)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile at the first call; run without the GIL. A product and a sum may be fused."""
    return _compiled(function, {"contract"})


def summing_kernel(function: Callable[..., Any]) -> Any:
    """The same with sums in any order, which lets LLVM vectorise them."""
    return _compiled(function, {"contract", "reassoc", "nsz"})


def _compiled(function: Callable[..., Any], liberties: set[str]) -> Any:
    function = inspect.unwrap(function)  # a run-time type checker may have wrapped it
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    compiled = numba.njit(**options, fastmath=liberties, pipeline_class=_Compiler)(function)
    try:
        compiled._cache = _Cache(function)
    except RuntimeError:  # no folder can be written: compiled in every process
        _say_not_kept("no cache folder is writable")
    return compiled
