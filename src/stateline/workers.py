"""Cores of this machine, and worker processes, which end with their parent."""

import multiprocessing
import os
import signal
import threading


def cores() -> int:
    """Number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def wait_passively() -> None:
    """Make waiting threads sleep, so that they free their cores; call it before PyTorch loads.

    A value of ``OMP_WAIT_POLICY`` that is already in the environment is kept. Processes that are
    started later inherit it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def serve_parent() -> None:
    """Call this in a worker: it ignores interrupts, and ends when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers itself
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Without this, a worker would wait forever for a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
