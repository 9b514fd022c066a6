"""Freed memory is kept for reuse by the command line, unless the user has chosen otherwise."""

import os
import platform
import subprocess
import sys

import pytest

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")

FAULTS = """
import resource, sys
from stateline.allocator import keep_freed_memory, name
keep_freed_memory()
def touch(size=64 << 20):
    block = bytearray(b"x") * size
for _ in range(2):
    touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(name(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def outcome(**variables: str) -> tuple[str, int]:
    """Setting of a fresh process, and page faults of a block as large as a freed one."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    name, faults = done.stdout.split()
    return name, int(faults)


@glibc
def test_freed_memory_is_used_again_without_page_faults() -> None:
    kept, few = outcome()
    system, many = outcome(STATELINE_ALLOCATOR="system")
    assert (kept, system) == ("keeping", "system")
    assert few < many / 100


@glibc
def test_options_in_the_environment_are_left_as_they_are() -> None:
    assert outcome(MALLOC_TRIM_THRESHOLD_="1000000")[0] == "system"
