"""Sizes at which one implementation becomes faster than another, measured once per machine.

``stateline bench tune`` measures them and writes them into the user's cache folder. Without that
file the defaults hold. A threshold changes which implementation runs, so results may differ in the
last bits between machines, or before and after tuning.
"""

import os
import platform
from functools import cache
from pathlib import Path

from stateline.errors import InputError
from stateline.files import read_json_object, user_path
from stateline.ops.backend import once_per_trace

DEFAULTS = {
    "attention.few_queries": 4,
    "attention.narrow_head": 16,
    "diagonal_ssm.by_response": 4,
    "short_conv.fft_taps": 16,
    "short_conv.numba_taps": 256,
}
"""Thresholds by name:

- ``attention.few_queries``: up to so many queries, the numba kernel puts vectors along the entries
  of a head.
- ``attention.narrow_head``: up to so many entries of a head, plain causal attention uses the numba
  kernel, beyond that PyTorch's.
- ``diagonal_ssm.by_response``: up to so many tokens per mode, batches are convolved with the
  impulse response, in H3 up to twice as many; longer sequences use the recurrence.
- ``short_conv.fft_taps``: from so many taps on, the torch backend convolves by FFT.
- ``short_conv.numba_taps``: up to so many taps, the numba kernel is used.
"""

VARIABLE = "STATELINE_CACHE"
"""Environment variable with the folder for what is measured on this machine."""


@once_per_trace
def threshold(name: str) -> int:
    """The threshold of this machine, or the default.

    Example:
        >>> threshold("short_conv.numba_taps") > 0
        True
    """
    return _measured().get(name, DEFAULTS[name])


def thresholds_file() -> Path:
    """Where the thresholds of this machine are stored."""
    if own := os.environ.get(VARIABLE):
        folder = user_path(own, "cache folder")
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stateline"
    return folder / f"thresholds-{platform.node() or 'machine'}.json"


@cache
def _measured() -> dict[str, int]:
    """Thresholds that were measured on this machine; a damaged file is an error."""
    file = thresholds_file()
    if not file.exists():
        return {}
    found = read_json_object(file, "file of thresholds")
    for name, value in found.items():
        if name not in DEFAULTS or type(value) is not int or value < 0:
            raise InputError(
                f"the file of thresholds {file} must hold counts by name, got {name}={value!r}: "
                "remove it, or run 'stateline bench tune' again"
            )
    return found
