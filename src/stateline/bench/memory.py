"""Peak memory of a call."""

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def peak_bytes(call: Callable[[], object], device: torch.device | str = "cpu") -> int | None:
    """Memory that a call needs beyond what is in use before it.

    On a CPU this is the growth of the resident set, so kernels of any kind are counted (Linux
    only). On a GPU it is what PyTorch's allocator hands out.

    Args:
        call: What to call; call it once before, so that lasting buffers exist.
        device: Where it computes.

    Returns:
        Bytes, or ``None`` where the operating system does not report it.
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


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    line = next(line for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])
