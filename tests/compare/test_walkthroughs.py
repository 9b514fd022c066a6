"""The commands of docs/how-to/cluster.md, as far as they go on a machine without a GPU."""

import importlib.util
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from stateline.cli import main, watch
from stateline.compare.slurm import Slurm
from stateline.runs import read_results

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "cluster.md").read_text()
SMALL = ["--d_model", "8", "--steps", "2", "--protocol", "quick", "--timing", "none"]
SMALL += ["--match", "none"]
TASK = ["--tasks", "associative_recall(length=4, batch_size=4)"]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def commands(heading: str) -> list[list[str]]:
    """The commands of a section."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```console\n(.*?)```", section, flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.strip()]


def without(arguments: list[str], *options: str) -> list[str]:
    """A command without some options and their values."""
    kept, dropped = list[str](), False
    for argument in arguments:
        dropped = argument in options or (dropped and not argument.startswith("--"))
        kept += [] if dropped else [argument]
    return kept


def test_several_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four workers on the CPU stand for the GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch.webbrowser, "open", lambda _: True)
    backends, first, again, report = commands("Eight GPUs in one machine")
    assert main([*without(backends, "--device"), "--device", "cpu"]) == 0
    here = [*SMALL, *TASK, "--device", "cpu", "--workers", "4"]
    dropped = ("--device", "--tasks", "--workers_per_gpu")
    assert "--watch" in first
    assert main([*without(first, *dropped, "--watch"), *here]) == 0
    assert "1/3 " in capsys.readouterr().out
    assert main([*without(again, *dropped), *here]) == 0
    assert "3 runs, 3 of them done before" in capsys.readouterr().out
    assert main(report) == 0
    assert "Which one, within state<=64KiB" in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'stateline[ray]'")
def test_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is started here, without GPUs, and a folder stands for a bucket."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    (command,) = commands("Ray")
    command = without(command, "--address", "--gpus_per_job", "--out")
    out = ["--gpus_per_job", "0", "--out", f"file://{tmp_path}/bucket"]
    assert main([*command, *SMALL, *TASK, *out]) == 0
    assert len(list((tmp_path / "bucket" / "runs").glob("*/result.json"))) == 3


@pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="pip install submitit")
def test_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit's executor for this machine runs the jobs, without GPUs."""
    executor = Slurm._executor
    monkeypatch.setattr(
        Slurm, "_executor", lambda own, folder: executor(replace(own, cluster="local"), folder)
    )
    (command,) = commands("Slurm")
    command = without(command, "--gpus_per_job", "--out")
    assert "slurm_partition=gpu" in command
    assert main([*command, *SMALL, *TASK, "--out", str(tmp_path)]) == 0
    assert len(read_results(tmp_path).runs) == 3
    assert list((tmp_path / "slurm").glob("*_0_log.out"))
