"""Devices and precisions by name.

PyTorch is imported only when a device is resolved, so that ``--help`` stays fast.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Literal

from stateline.errors import InputError

if TYPE_CHECKING:
    import torch

DTypeName = Literal["float32", "bfloat16", "float16", "float64"]

_SIDE = 512
"""Side of the square matrices whose product is timed: a millisecond in float32."""

_log = logging.getLogger("stateline")

_NAME = re.compile(r"auto|cpu|mps|meta|cuda(?::(?P<index>\d{1,4}))?")


def resolve_device(name: str = "auto") -> torch.device:
    """The device with a name.

    Args:
        name: ``auto`` (CUDA if there is a CUDA device, else the CPU), ``cpu``, ``cuda``,
            ``cuda:N``, ``mps``, or ``meta`` (shapes without values).

    Raises:
        InputError: If the name is malformed, or this machine has no such device.

    Example:
        >>> resolve_device("cpu")
        device(type='cpu')
    """
    import torch

    found = _NAME.fullmatch(name)
    if found is None:
        raise InputError(
            f"device must be auto, cpu, cuda, cuda:N, mps or meta, got {name!r}: {_here()}"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    if name.startswith("cuda") and int(found["index"] or 0) >= count:
        raise InputError(f"device {name} was asked for, but {_here()}")
    if name == "mps" and not torch.backends.mps.is_available():
        raise InputError(f"device mps was asked for, but {_here()}")
    return torch.device(name)


def resolve_dtype(name: str | None) -> torch.dtype | None:
    """The dtype with a name; ``None`` if there is no name.

    Raises:
        InputError: If it is not one of ``float32``, ``bfloat16``, ``float16`` and ``float64``.

    Example:
        >>> resolve_dtype("bfloat16"), resolve_dtype(None)
        (torch.bfloat16, None)
    """
    import torch

    known: tuple[str, ...] = DTypeName.__args__  # type: ignore[attr-defined]
    if name is not None and name not in known:
        raise InputError(f"dtype must be one of {', '.join(known)}, got {name!r}")
    return None if name is None else getattr(torch, name)


def _here() -> str:
    """The devices of this machine, in words."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ["cpu", *(f"cuda:{index}" for index in range(count))]
    if torch.backends.mps.is_available():
        names.append("mps")
    return f"this machine has {', '.join(names)}"


def cuda_seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of some calls, one after the other, on a CUDA device, which may not be the current.

    They are the time between two events of the device itself, without the cost of waiting for it.
    """
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    torch.cuda.synchronize(device)
    begin.record(stream)
    for _ in range(repeats):
        call()
    end.record(stream)
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


@cache
def log_bfloat16_rate() -> None:
    """Measure and log, once, how fast the CPU multiplies in bfloat16: fast only with AMX."""
    import torch

    def seconds(dtype: torch.dtype) -> float:
        a, b = torch.ones(2, _SIDE, _SIDE, dtype=dtype)
        times = []
        for _ in range(4):  # the first one warms up
            started = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - started)
        return min(times[1:])

    rate = seconds(torch.float32) / seconds(torch.bfloat16)
    _log.info("this processor multiplies in bfloat16 at %.2g times the rate of float32", rate)
