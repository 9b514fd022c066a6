"""Sizes at which one implementation becomes faster than another, measured once per machine.

``stateline bench tune --out FILE`` measures them. They hold where the environment names that file
(:data:`VARIABLE`), and the defaults elsewhere. A threshold changes which implementation runs, so
results may differ in the last bits between machines, or before and after tuning.
"""

import os
from functools import cache

from stateline.errors import InputError
from stateline.files import read_json_object, user_path
from stateline.ops.dispatch import once_per_trace

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

VARIABLE = "STATELINE_THRESHOLDS"
"""Environment variable with the file of what was measured on this machine."""


@once_per_trace
def threshold(name: str) -> int:
    """The threshold of this machine, or the default.

    Example:
        >>> threshold("short_conv.numba_taps") > 0
        True
    """
    return _measured().get(name, DEFAULTS[name])


@cache
def _measured() -> dict[str, int]:
    """Thresholds that were measured on this machine; a damaged file is an error."""
    given = os.environ.get(VARIABLE)
    if not given:
        return {}
    file = user_path(given, "file of thresholds")
    found = read_json_object(file, "file of thresholds")
    for name, value in found.items():
        if name not in DEFAULTS or type(value) is not int or value < 0:
            raise InputError(
                f"the file of thresholds {file} must hold counts by name, got {name}={value!r}: "
                f"unset {VARIABLE}, or run 'stateline bench tune' again"
            )
    return found
