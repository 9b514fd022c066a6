"""The fuzzer notices every way to break the promise."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.refusals.fuzz import run as fuzz
from tests.refusals.fuzz.cases import Case

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

Main = Callable[[Sequence[str]], int]


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    folder = tmp_path / "prepared"
    folder.mkdir()
    (folder / "old").write_text("old")
    return folder


def refuse(text: str = "stateline: error: no\n", *, write: str = "", code: int = 2) -> Main:
    """A command that says something, and perhaps writes a file."""

    def main(arguments: Sequence[str]) -> int:
        sys.stderr.write(text)
        if write:
            Path(write).write_text("new")
        return code

    return main


def fail(arguments: Sequence[str]) -> int:
    raise KeyError("x")


def crash(arguments: Sequence[str]) -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    return 0


def leave(arguments: Sequence[str]) -> int:
    sys.exit(3)


def wait(arguments: Sequence[str]) -> int:
    time.sleep(600)
    return 0


def spin(arguments: Sequence[str]) -> int:
    while True:
        pass


def remove(arguments: Sequence[str]) -> int:
    Path("old").unlink()
    return 0


@pytest.mark.parametrize(
    ("main", "fault"),
    [
        (fail, "a traceback: KeyError: 'x'"),
        (crash, "signal SIGTERM"),
        (leave, "exit code 3"),
        (wait, "it computed or waited for 1 seconds"),
        (spin, "it computed or waited for 1 seconds"),
        (remove, "changed: old"),
        (refuse("one\ntwo\n"), "2 lines on standard error"),
        (refuse(""), "0 lines on standard error"),
        (refuse("error: no\n"), "1 lines on standard error"),
        (refuse(write="old"), "changed: old"),
        (refuse(write="left"), "left behind: left"),
        (refuse("", code=1), "exit code 1"),
    ],
)
def test_a_broken_promise_is_noticed(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, main: Main, fault: str
) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    assert fuzz.run(Case("", ["info"]), prepared, main).faults == [fault]
    assert (prepared / "old").read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "main"),
    [
        (["info"], refuse()),
        (["info"], refuse("", code=0)),
        (["generate"], refuse("state: 3 B\nstateline: error: no\n")),
        (["check"], refuse("", code=1)),
        (["train", "--out", "new"], refuse("", code=0, write="new")),
        (["train", "--out", "old"], refuse("", code=0, write="old")),
    ],
)
def test_a_kept_promise_is_no_fault(prepared: Path, arguments: list[str], main: Main) -> None:
    assert fuzz.run(Case("", arguments), prepared, main).faults == []


def test_what_must_be_refused_may_not_be_taken(prepared: Path) -> None:
    case = Case("", ["info"], refused=True)
    assert fuzz.run(case, prepared, refuse("", code=0)).faults == ["it was taken"]
    assert fuzz.run(case, prepared, refuse()).faults == []


def test_a_case_meets_its_damage_and_no_rights_of_root(prepared: Path) -> None:
    def main(arguments: Sequence[str]) -> int:
        try:
            Path("old").read_text()
        except PermissionError:
            return 0
        return 9

    damage = lambda: Path("old").chmod(0)  # noqa: E731
    assert fuzz.run(Case("", ["info"], damage), prepared, main).code == 0
