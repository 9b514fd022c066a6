"""Help and version, each in its own process, to check that PyTorch is not imported."""

import subprocess
import sys
from importlib import metadata

import pytest

from stateline.cli import COMMANDS

ANSWER = """
import sys
from stateline.cli import main
try:
    code = main()
except SystemExit as end:
    code = end.code
assert "torch" not in sys.modules, "imports PyTorch"
sys.exit(code)
"""


def answer(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_on_a_command_needs_no_torch(command: str) -> None:
    assert answer(command, "--help").startswith(f"usage: stateline {command} ")


def test_help_names_every_command() -> None:
    told = answer("--help")
    assert all(f"  {name:<10}{text}\n" in told for name, text in COMMANDS.items())


def test_help_comes_where_nothing_is_asked() -> None:
    assert answer() == answer("-h")


def test_the_version_is_that_of_the_package() -> None:
    assert answer("--version") == f"stateline {metadata.version('stateline')}\n"
