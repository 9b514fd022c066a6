"""Fixtures for tests of broken input: a folder with valid files of every kind, and ``refused``."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stateline.cli import main
from tests.prepared import contents, prepare

Refused = Callable[..., str]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a valid file of every kind that commands read."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare()
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the prepared folder, as the current folder."""
    shutil.copytree(prepared, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def refused(
    unannotated: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command that must fail, and return the line that it prints.

    Checks that no file is changed or removed, that nothing remains except what ``new`` names, and
    that standard output is empty or begins with ``said``.
    """

    def run(command: str, *, new: tuple[str, ...] = (), said: str = "") -> str:
        capsys.readouterr()
        before = contents(Path())
        assert main(shlex.split(command)) == 2
        shown = capsys.readouterr()
        after = contents(Path())
        assert before.items() <= after.items()
        found = after.keys() - before.keys()
        assert [path for path in found if not any(path.match(name) for name in new)] == []
        assert shown.out == "" or (said and shown.out.startswith(said))
        (line,) = shown.err.splitlines()
        assert line.startswith("stateline: error: ")
        return line.removeprefix("stateline: error: ")

    return run
