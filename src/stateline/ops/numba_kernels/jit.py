"""The decorator of all kernels: compiled once per machine, kept on disk."""

# mypy: ignore-errors

import hashlib
import inspect
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import caching, event

_log = logging.getLogger("stateline")


@cache
def _sources() -> str:
    """Hash of all files that kernels are made of.

    Numba notices changes in a kernel's own file only, not in the functions that it calls.
    """
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class _BesideTheSources(caching.InTreeCacheLocator):
    def get_source_stamp(self) -> str:
        return _sources()


class _InTheUsersFolder(caching.UserWideCacheLocator):
    def get_source_stamp(self) -> str:
        return _sources()


class _WhereTheUserSays(caching.UserProvidedCacheLocator):
    def get_source_stamp(self) -> str:
        return _sources()


class _Files(caching.CompileResultCacheImpl):
    _locator_classes = (_WhereTheUserSays, _BesideTheSources, _InTheUsersFolder)


class _Cache(caching.FunctionCache):
    _impl_class = _Files


class _SayOnce(event.Listener):
    """Logs one line when the first kernel is compiled."""

    said = False

    def on_start(self, event: Any) -> None:
        dispatcher = event.data["dispatcher"]
        if not self.said and dispatcher.py_func.__module__.startswith(__package__ or "stateline"):
            self.said = True
            _log.info("compiling CPU kernels, once per machine: this takes a few seconds")

    def on_end(self, event: Any) -> None:
        """Nothing to do."""


event.register("numba:compile", _SayOnce())


@cache
def _say_not_kept() -> None:
    _log.info("CPU kernels are compiled anew in every process: no cache folder is writable")


def kernel(function: Callable[..., Any]) -> Any:
    """Compile at the first call; run without the GIL. A product and a sum may be fused."""
    return _compiled(function, {"contract"})


def summing_kernel(function: Callable[..., Any]) -> Any:
    """The same, where sums may be taken in any order: LLVM vectorises sums only if it may."""
    return _compiled(function, {"contract", "reassoc", "nsz"})


def _compiled(function: Callable[..., Any], liberties: set[str]) -> Any:
    function = inspect.unwrap(function)  # a run-time type checker may have wrapped it
    compiled = numba.njit(nogil=True, error_model="numpy", boundscheck=False, fastmath=liberties)(
        function
    )
    try:
        compiled._cache = _Cache(function)
    except RuntimeError:  # no folder can be written: compiled in every process
        _say_not_kept()
    return compiled
