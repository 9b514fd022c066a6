"""``stateline serve`` as a process: killed, started again, and what it refuses."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.applications import Starlette
from torch.utils import _pytree as pytree

from stateline.cli import main
from stateline.generate import PrefixStates
from stateline.generate.session import Session
from stateline.models.checkpoint import load_model, save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from tests.serve.running import Client, opinionated

pytestmark = [pytest.mark.usefixtures("unannotated"), pytest.mark.cpu]


@contextmanager
def serving(run: Path, *options: str, name: str = "tiny") -> Iterator[tuple[Client, int]]:
    """A server in a process of its own, which is killed at the end."""
    command = [sys.executable, "-m", "stateline", "serve", str(run), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"{name} at http://127.0.0.1:")
        yield Client(int(line.split(":")[-1].split("/")[0])), process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_a_killed_server_goes_on_bit_by_bit(tmp_path: Path) -> None:
    save_model(opinionated(), tmp_path / "tiny")
    states = "--states", str(tmp_path / "kept"), "--every", "16"
    with serving(tmp_path / "tiny", *states) as (client, pid):
        first = client.respond("a turn before the end")
        wanted = client.respond(" and after", previous_response_id=first["id"])
        os.kill(pid, signal.SIGKILL)
    with serving(tmp_path / "tiny", *states) as (client, _):
        found = client.respond(" and after", previous_response_id=first["id"])
        assert found["output"][0]["content"] == wanted["output"][0]["content"]
    model = load_model(tmp_path / "tiny")
    kept = PrefixStates(model, folder=tmp_path / "kept")
    alone = PrefixStates(model, every=16)
    prompt = list(b"a turn before the end")
    read = alone.read(prompt)
    session, key = Session(model, read.state), read.key
    for _ in range(12):
        (key,) = alone.keys([int(session.step().tokens)], key)
    assert first["id"].startswith(f"resp_{key.hex()}_")
    loaded = kept.get(key)
    assert loaded is not None
    pairs = zip(*(pytree.tree_leaves(s.model) for s in (loaded, session.state())), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert Session(model, loaded).step().logits.equal(session.step().logits)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_stopped_says_what_became_of_its_states(
    tmp_path: Path, number: int
) -> None:
    save_model(opinionated("lstm"), tmp_path / "tiny")
    command = [sys.executable, "-m", "stateline", "serve", str(tmp_path / "tiny"), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    *_, last = told.splitlines()  # kernels may be compiled first, and told
    assert last == "stateline: the server has ended; its states are gone"
    assert process.returncode == 128 + number


@pytest.mark.parametrize(
    ("settings", "options", "longest"),
    [
        ({}, (), 1 << 20),
        ({"max_len": 70}, (), 70),
        ({"trained_len": 77}, (), 77),
        ({"trained_len": 77}, ("--max_length", "99"), 99),
    ],
)
def test_the_models_longest_text_is_the_limit(
    settings: dict[str, int],
    options: tuple[str, ...],
    longest: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unserved:
        def __init__(self, app: Starlette) -> None:
            assert app.state.service.limits.length == longest

        def run(self, sockets: Any) -> None:
            sockets[0].close()

    monkeypatch.setattr("stateline.serve.make_server", Unserved)
    model = LanguageModel(ModelConfig("attention(position=rope)", 256, 8, **settings))
    save_model(model, tmp_path / "tiny")
    assert main(["serve", str(tmp_path / "tiny"), "--port", "0", *options]) == 0
    assert ("trained on texts of up to 77 tokens" in caplog.text) == bool(options)


def test_wrong_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(opinionated("lstm"), tmp_path / "tiny")
    for option, message in (
        (("--port", "99999"), "a port must be from 0 to 65535, got 99999"),
        (("--host", "203.0.113.1"), "cannot listen at 203.0.113.1:8000"),
        (("--max_rows", "0"), "max_rows must be at least 1, got max_rows=0"),
        (("--every", "0"), "every, memory and disk must be positive"),
    ):
        assert main(["serve", str(tmp_path / "tiny"), *option]) == 2
        assert message in capsys.readouterr().err


def test_without_its_packages_the_command_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("stateline.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert main(["serve", str(tmp_path)]) == 2
    assert "pip install 'stateline[serve]'" in capsys.readouterr().err
