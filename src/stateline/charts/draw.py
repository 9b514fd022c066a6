"""Drawing by Vega, in a process of its own.

vl-convert, which runs Vega in V8, ends its process where it may not reserve address space, as under
the limits that batch systems set (``ulimit -v``). That process runs this file, which imports
nothing else of the library.
"""

import base64
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RendererCall = tuple[str, Mapping[str, Any]]
"""A function of vl-convert and its arguments."""

_drawn: dict[str, str] = {}


class CannotDrawError(RuntimeError):
    """Nothing can be drawn here; the message says why."""


def draw(calls: Iterable[RendererCall]) -> list[str]:
    """Call functions of vl-convert; results of earlier calls are cached.

    Args:
        calls: The calls.

    Returns:
        What they return; bytes as base64.

    Raises:
        CannotDrawError: If the package is missing, or cannot run here.
    """
    keys = [json.dumps(call) for call in calls]
    if missing := [key for key in dict.fromkeys(keys) if key not in _drawn]:
        _drawn.update(zip(missing, _in_a_process(missing), strict=True))
    return [_drawn[key] for key in keys]


def _in_a_process(calls: Sequence[str]) -> list[str]:
    if importlib.util.find_spec("vl_convert") is None:
        raise CannotDrawError("images need vl-convert: pip install 'stateline[images]'")
    done = subprocess.run(
        [sys.executable, "-P", __file__],
        input=f"[{','.join(calls)}]",
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        raise CannotDrawError(
            f"the process that draws images ended with code {done.returncode}: it needs more "
            "address space (ulimit -v unlimited)"
        )
    found: list[str] = json.loads(done.stdout)
    return found


def _main() -> None:
    import vl_convert

    found = []
    for function, arguments in json.load(sys.stdin):
        result = getattr(vl_convert, function)(**arguments)
        found.append(result if isinstance(result, str) else base64.b64encode(result).decode())
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    _main()
