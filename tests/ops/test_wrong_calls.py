"""Wrong calls of public ops, each in a process of its own."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_wrong_call_is_refused_or_answered_rightly() -> None:
    command = [sys.executable, "-m", "tests.ops.wrong_calls", "--count", "400", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
