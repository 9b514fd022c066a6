"""What a run records of itself: enough to know what ran, and to run it again."""

import platform
from importlib import metadata
from pathlib import Path

import torch


def environment() -> dict[str, str | int]:
    """Versions and machine, as far as they bear on results and speed."""
    return {
        "stateline": metadata.version("stateline"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
