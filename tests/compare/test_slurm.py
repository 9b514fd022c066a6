"""The engine ``slurm``, with the executor of submitit that starts processes on this machine."""

import importlib.util
import sys
from pathlib import Path

import pytest

from stateline.cli import main
from stateline.cli.options import add_device, add_engine, make_engine
from stateline.cli.parser import Parser
from stateline.compare import Comparison, compare
from stateline.compare.news import News
from stateline.compare.slurm import Slurm
from stateline.errors import InputError

RECALL = "associative_recall(length=4, batch_size=4)"

needs_submitit = pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None, reason="pip install submitit"
)


@needs_submitit
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_jobs_on_slurm_come_to_the_scores_of_this_process(tmp_path: Path) -> None:
    comparison = Comparison(["lstm"], [f"{RECALL}*2"], d_model=8, steps=3, protocol="quick")
    own = compare(comparison, tmp_path / "own", workers=0, timing="none")
    engine = Slurm(cluster="local", options={"timeout_min": 10})
    other = compare(comparison, tmp_path / "slurm", engine=engine, timing="none")
    assert [run.by_length for run in other.runs] == [run.by_length for run in own.runs]
    assert len(other.runs) == 2


@needs_submitit
def test_without_slurm_or_with_an_unknown_option_it_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^cannot submit to slurm: "):
        Slurm().open(tmp_path, {}, News()).__enter__()
    with pytest.raises(InputError, match=r"^cannot submit to local: "):
        Slurm(cluster="local", options={"colour": 1}).open(tmp_path, {}, News()).__enter__()


def test_without_submitit_it_is_said_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(InputError, match=r"stateline\[slurm\]"):
        Slurm().open(tmp_path, {}, News()).__enter__()


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="Slurm wants cpus_per_job to be int of at least 1, got 0"):
        Slurm(cpus_per_job=0)


@pytest.mark.parametrize(
    ("engine", "gpus"),
    [
        (Slurm(options={"slurm_partition": "fast"}), 1),
        (Slurm(options={"slurm_partition": "other,fast"}), 1),
        (Slurm(options={"slurm_partition": "cpu"}), 0),
        (Slurm(options={"slurm_partition": "fast"}, gpus_per_job=0), 0),
        (Slurm(), 0),  # of the default partition, cpu
        (Slurm(cluster="local", options={"slurm_partition": "fast"}), 0),
    ],
)
def test_a_job_takes_a_gpu_where_the_partition_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Slurm, gpus: int
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho 'cpu* (null)'\necho 'fast gpu:a100:8(S:0-1)'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert engine._gpus() == gpus


def engine_of(*arguments: str) -> object:
    parser = Parser(prog="stateline compare")
    add_device(parser)
    add_engine(parser)
    return make_engine(parser.parse_args(arguments))


def test_the_options_of_the_command_line_reach_submitit() -> None:
    parameters = ["--slurm", "slurm_partition=gpu", "timeout_min=600"]
    engine = engine_of("--engine", "slurm", "--gpus_per_job", "2", *parameters)
    wanted = Slurm(gpus_per_job=2, options={"slurm_partition": "gpu", "timeout_min": 600})
    assert engine == wanted
    assert isinstance(engine, Slurm)
    assert engine.options == wanted.options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slurm", "a=1"], "--slurm is an option of --engine slurm"),
        (["--engine", "slurm", "--retries", "2"], "--retries is an option of --engine ray"),
        (["--engine", "slurm", "--slurm", "time"], "--slurm needs NAME=VALUE, got 'time'"),
        (["--engine", "slurm", "--gpus_per_job", "0.5"], "must be a whole number with --engine sl"),
        (["--gpus_per_job", "1"], "--gpus_per_job is an option of --engine ray or slurm"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine_of(*arguments)


@pytest.mark.parametrize(("engine", "package"), [("slurm", "submitit"), ("ray", "ray")])
def test_the_package_of_an_engine_is_looked_for_before_anything_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    out = tmp_path / "out"
    assert main(["compare", "lstm", "--tasks", RECALL, "--engine", engine, "--out", str(out)]) == 2
    assert f"the engine {engine} needs the package {package}: pip" in capsys.readouterr().err
    assert not out.exists()
