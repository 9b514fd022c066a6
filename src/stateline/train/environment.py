"""The record of where a run took place."""

import platform
from importlib import metadata
from pathlib import Path

import torch


def environment() -> dict[str, str | int]:
    """Versions and machine, which results and speed depend on.

    With ``amx`` = 1, products in bfloat16 run on the matrix units of the processor. ``gpu`` and
    ``cuda`` are there where there is a CUDA device.
    """
    gpu: dict[str, str | int] = {}
    if torch.cuda.is_available():
        gpu = {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return gpu | {
        "stateline": metadata.version("stateline"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "amx": int("amx_bf16" in _cpu_info()),
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    names = (
        line.partition(":")[2].strip()
        for line in _cpu_info().splitlines()
        if line.startswith("model name")
    )
    return next(names, platform.processor() or platform.machine())


def _cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
