"""Help and version, in a process of their own, to check that PyTorch is not imported."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

from stateline.cli import COMMANDS

ANSWER = """
import contextlib, io, json, sys
from stateline.cli import main
def answer(line):
    with contextlib.redirect_stdout(io.StringIO()) as told:
        try:
            code = main(line.split())
        except SystemExit as end:
            code = end.code
    return code, told.getvalue(), "torch" in sys.modules
print(json.dumps({line: answer(line) for line in json.loads(sys.argv[1])}))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, list[object]]:
    """For each command line: the exit code, what was printed, and whether PyTorch was imported."""
    lines = ["", "-h", "--help", "--version", *(f"{command} --help" for command in COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, json.dumps(lines)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_on_a_command_needs_no_torch(
    command: str, answers: dict[str, tuple[int, str, bool]]
) -> None:
    code, told, torch = answers[f"{command} --help"]
    assert told.startswith(f"usage: stateline {command} ")
    assert (code, torch) == (0, False)


def test_help_names_every_command(answers: dict[str, tuple[int, str, bool]]) -> None:
    _, told, torch = answers["--help"]
    assert all(f"  {name:<10}{text}\n" in told for name, text in COMMANDS.items())
    assert not torch


def test_help_comes_where_nothing_is_asked(answers: dict[str, object]) -> None:
    assert answers[""] == answers["-h"] == answers["--help"]


def test_the_package_is_the_command_and_has_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stateline", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"stateline {metadata.version('stateline')}\n"
