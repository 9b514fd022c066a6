"""Standard output whose reader has gone, or whose disk is full."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stateline.cli import main

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def ended(*arguments: str, output: int) -> tuple[int, str]:
    """The exit code of a command and what it writes to standard error."""
    command = [sys.executable, "-m", "stateline", *arguments]
    done = subprocess.run(
        command, stdout=output, stderr=subprocess.PIPE, env=BUFFERED, text=True, check=False
    )
    return done.returncode, done.stderr


@pytest.fixture
def unread() -> int:
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("command", ["--version", "check --help"])
def test_output_that_nobody_reads_is_no_error(command: str, unread: int) -> None:
    assert ended(*command.split(), output=unread) == (0, "")


def test_output_without_room_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        told = ended("--version", output=full.fileno())
    assert told == (2, "stateline: error: No space left on device\n")


def test_scores_that_nobody_reads_are_written(
    folder: Path, unread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(unread, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(["evaluate", "run", "book.txt", "--out", "scores.json"]) == 0
    assert (folder / "scores.json").exists()


@pytest.mark.parametrize("columns", ["0", ""])
def test_no_columns_are_no_width(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["info", "lstm"]) == 0
    command = [sys.executable, "-m", "stateline", "info", "lstm"]
    given = {**os.environ, "COLUMNS": columns}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=given).stdout
    assert shown == capsys.readouterr().out != ""
