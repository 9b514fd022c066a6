"""The record of where a run took place names the code that ran."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from stateline.train import environment
from stateline.train.processes import Processes


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


def test_asking_for_the_commit_writes_nothing_into_the_repository(checkout: Path) -> None:
    """``git status`` would lock and refresh the index, in the way of a commit beside it."""
    os.utime(checkout, (1, 1))
    index = checkout.parents[2] / ".git" / "index"
    before = index.read_bytes()
    assert not environment._commit.__wrapped__().endswith("+")
    assert index.read_bytes() == before


def test_code_outside_of_a_checkout_has_no_commit(checkout: Path) -> None:
    git(checkout.parent, "rm", "-q", "--cached", "environment.py")
    assert environment._commit.__wrapped__() == ""


def test_the_gpu_is_the_one_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["H100", "A100"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device=None: names[device.index if device else 0]
    )
    assert Processes(device=torch.device("cuda:1")).environment()["gpu"] == "A100"
    assert Processes(device=torch.device("cpu")).environment()["gpu"] == "H100"
