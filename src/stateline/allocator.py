"""Makes the C library keep freed memory for the next tensor.

By default, glibc returns large freed blocks to the operating system, which clears every page again
for the next tensor. That takes up to a third of a small model's training step.
"""

import ctypes
import logging
import os
import platform

VARIABLE = "STATELINE_ALLOCATOR"
"""Environment variable: ``system`` leaves the C library as it is."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt's options in malloc.h
_OPTIONS = {
    _MMAP_THRESHOLD: 1 << 30,  # smaller blocks come from the heap
    _TRIM_THRESHOLD: (1 << 31) - 1,  # bytes at the top of the heap that are kept
    _TOP_PAD: 1 << 26,  # additional bytes whenever the heap grows
}

_log = logging.getLogger("stateline")
_keeps = False


def keep_freed_memory() -> None:
    """Set the options of glibc's ``malloc`` for this process, which then keeps its peak memory.

    Nothing changes with ``STATELINE_ALLOCATOR=system``, with another C library or another allocator
    (``LD_PRELOAD``), or if the environment sets options of ``malloc``.
    """
    global _keeps
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "LD_PRELOAD" in os.environ
    if os.environ.get(VARIABLE) == "system" or chosen or platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    _keeps = all(library.mallopt(option, value) for option, value in _OPTIONS.items())
    if _keeps:
        _log.debug("freed memory is kept for reuse; %s=system gives it back", VARIABLE)


def name() -> str:
    """``keeping`` if this process keeps freed memory, else ``system``."""
    return "keeping" if _keeps else "system"
