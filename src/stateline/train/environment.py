"""The record of where a run took place."""

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import torch


def environment(device: torch.device | None = None) -> dict[str, str | int]:
    """Versions and machine, which results and speed depend on.

    With ``amx`` = 1, products in bfloat16 run on the matrix units of the processor. ``gpu`` and
    ``cuda`` are there where there is a CUDA device; ``gpu`` names ``device``, if it is one.
    ``commit`` is there where the library runs from a Git checkout; it ends with ``+`` if files of
    the library differ from the commit.
    """
    gpu: dict[str, str | int] = {}
    if torch.cuda.is_available():
        used = device if device is not None and device.type == "cuda" else None
        gpu = {"gpu": torch.cuda.get_device_name(used), "cuda": str(torch.version.cuda)}
    commit = {"commit": found} if (found := _commit()) else {}
    return {
        **gpu,
        **commit,
        "stateline": metadata.version("stateline"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "amx": int("amx_bf16" in _cpu_info()),
        "threads": torch.get_num_threads(),
    }


@cache
def _commit() -> str:
    """The commit of the library's checkout; empty if there is none."""
    folder = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", "--", __file__):  # an installation inside another project's checkout
            return ""
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


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
