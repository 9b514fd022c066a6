"""The record of where a run took place names the code that ran."""

import subprocess
from pathlib import Path

import pytest

from stateline.train import environment


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in which the module lies, with one commit."""
    file = tmp_path / "stateline" / "train" / "environment.py"
    file.parent.mkdir(parents=True)
    file.write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    who = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.org")
    git(tmp_path, *who, "commit", "-q", "-m", "first")
    monkeypatch.setattr(environment, "__file__", str(file))
    return file


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_and_whether_files_differ_from_it(checkout: Path) -> None:
    commit = environment._commit.__wrapped__
    head = git(checkout.parent, "rev-parse", "HEAD")
    assert commit() == head
    checkout.write_text("# changed")
    assert commit() == head + "+"


def test_code_outside_of_a_checkout_has_no_commit(checkout: Path) -> None:
    git(checkout.parent, "rm", "-q", "--cached", "environment.py")
    assert environment._commit.__wrapped__() == ""
