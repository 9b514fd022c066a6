"""Which implementation of an op runs.

Every op has a folder with one file per backend: ``reference`` is the definition, slow and obvious;
every other one must match it in outputs and gradients.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from stateline.errors import unknown_name

P = ParamSpec("P")
T = TypeVar("T")

_preferred = "auto"


def choose(op: str, backends: Mapping[str, ModuleType], backend: str) -> Any:
    """Module that implements ``op``.

    Args:
        op: Name of the op, for messages.
        backends: Its implementations, the preferred one first.
        backend: Name of one of them, or ``"auto"``: the one set by :func:`use_backend`, else the
            first.

    Raises:
        InputError: If the op has no backend of that name.
    """
    name = _preferred if backend == "auto" else backend
    if name == "auto":
        return next(iter(backends.values()))
    if name not in backends:
        raise unknown_name(f"backend of {op}", name, [*backends, "auto"])
    return backends[name]


def own_precision(op: Callable[P, T]) -> Callable[P, T]:
    """Let autocast leave an op alone: where rounding accumulates, it chooses its own precision."""

    @wraps(op)
    def run(*inputs: P.args, **keywords: P.kwargs) -> T:
        device = next(x.device.type for x in inputs if isinstance(x, Tensor))
        if device == "meta" or not torch.is_autocast_enabled(device):
            return op(*inputs, **keywords)
        with torch.autocast(device, enabled=False):
            return op(*inputs, **keywords)

    return run


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Let every op inside the ``with`` block run on one backend.

    Example:
        >>> import torch
        >>> from stateline.ops import fft_conv
        >>> with use_backend("reference"):
        ...     fft_conv(torch.ones(1, 3, 1), torch.ones(1, 2)).flatten().tolist()
        [1.0, 2.0, 2.0]
    """
    global _preferred
    before, _preferred = _preferred, name
    try:
        yield
    finally:
        _preferred = before
