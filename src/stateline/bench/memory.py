"""Peak memory of a call, and memory that is free."""

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def peak_bytes(call: Callable[[], object], device: torch.device | str = "cpu") -> int | None:
    """Memory that a call needs in addition to the memory in use before it.

    On a CPU this is the growth of the resident set, so kernels of any kind are counted (Linux
    only; elsewhere ``None``). On a GPU it is what PyTorch's allocator allocates. Make the call once
    before, so that lasting buffers exist.
    """
    device = torch.device(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not sys.platform.startswith("linux"):
        return None
    ctypes.CDLL(None).malloc_trim(0)  # give freed pages back, or reusing them would not count
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    except OSError:
        return None
    before = _resident("VmRSS")
    call()
    return max(0, _resident("VmHWM") - before)


def available_bytes(device: torch.device | str = "cpu") -> int | None:
    """Memory that is free on a device; for a CPU, also within the limit of its control group.

    On a GPU, what PyTorch's allocator has reserved and can hand out again is free, too.
    ``None`` where the operating system does not report it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    try:
        free = _kilobytes(Path("/proc/meminfo"), "MemAvailable")
    except OSError:
        return None
    group = Path("/sys/fs/cgroup")
    try:
        used, most = (int((group / f"memory.{name}").read_text()) for name in ("current", "max"))
    except (OSError, ValueError):  # no control group, or one without a limit
        return free
    return min(free, max(0, most - used))


def _resident(field: str) -> int:
    return _kilobytes(Path("/proc/self/status"), field)


def _kilobytes(path: Path, field: str) -> int:
    """The bytes of a field that a file in ``/proc`` gives in kilobytes."""
    lines = path.read_text(encoding="ascii").splitlines()
    line = next(line for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])
