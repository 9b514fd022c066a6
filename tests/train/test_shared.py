"""Checkpoints that several processes write: whole, whoever dies, and the same for any number."""

import json
import re
from pathlib import Path
from signal import SIGKILL

import pytest
import torch

from stateline.models.checkpoint import load_model
from stateline.train.folder import found
from stateline.train.metrics import METRICS
from tests.train.held import forked, held


def same(one: Path, other: Path) -> bool:
    ours, theirs = held(one), held(other)
    return ours.keys() == theirs.keys() and all(ours[n].equal(theirs[n]) for n in ours)


def learned(folder: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / METRICS).read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_is_read_and_written_by_one_and_by_four(
    tmp_path: Path,
) -> None:
    assert forked("reshard", tmp_path) == [[0, 0], [0], [0, 0, 0, 0]]
    two, one, four = (found(tmp_path / name)[-1] for name in ("two", "one", "four"))
    assert same(two, one)
    assert same(one, four)
    assert [len(list(path.glob("model*.safetensors"))) for path in (two, one, four)] == [2, 1, 4]
    sizes = [file.stat().st_size for file in four.glob("training*.safetensors")]
    assert max(sizes) < 1.5 * min(sizes)
    tokens = torch.tensor([[1, 2, 3]])
    assert load_model(four)(tokens).equal(load_model(one)(tokens))


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_eight_times_end_with_the_same_bits(
    tmp_path: Path,
) -> None:
    first, *killed, last = forked("kill", tmp_path)
    assert first == last == [0, 0]
    assert all(SIGKILL in ends for ends in killed)
    assert same(found(tmp_path / "whole")[-1], found(tmp_path / "killed")[-1])
    assert learned(tmp_path / "whole") == learned(tmp_path / "killed")


@pytest.mark.slow
def test_a_process_that_cannot_write_ends_the_run_and_the_older_checkpoint_stays(
    tmp_path: Path,
) -> None:
    assert forked("full", tmp_path)[0] == [0, 0]
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(names) == ["step-00000002", "step-00000004"]
    error = (tmp_path / "error").read_text()
    assert re.fullmatch(r"cannot write .*step-00000006: File too large; choose another.*", error)


@pytest.mark.slow
def test_a_process_whose_partner_was_killed_ends_with_one_line(tmp_path: Path) -> None:
    assert forked("left", tmp_path) == [[0, SIGKILL]]
    error = (tmp_path / "error").read_text()
    assert error.startswith("another of the 2 processes has ended or no longer answers: ")


@pytest.mark.slow
def test_no_process_waits_for_the_disk(tmp_path: Path) -> None:
    """The files are written after two more updates of all processes."""
    assert forked("slow", tmp_path) == [[0, 0]]
    assert [path.name for path in found(tmp_path / "run")] == ["step-00000002"]
    assert not (tmp_path / "error").exists()
