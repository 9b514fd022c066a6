"""The one command that produces the figures of a GPU: every command in it can be given."""

import os
import shlex
import subprocess
import sys
import tarfile
from importlib import import_module
from pathlib import Path

import pytest

from stateline.bench.run import _named
from stateline.cli import Parser
from stateline.cli.train import read_recipe
from stateline.models.config import ModelConfig
from stateline.models.size import count_parameters
from stateline.ops import OPS
from stateline.pattern import parse_pattern

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def steps(*names: str, **variables: str) -> dict[str, list[str]]:
    """The command of every step; with the names of ops, the script starts no Python."""
    known = {"PYTHON": sys.executable} | ({} if "SMOKE" in variables else {"OPS": " ".join(OPS)})
    printed = subprocess.run(
        [SCRIPT, *names],
        env={**os.environ, "DRY": "1", **known, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = (line.partition(": ") for line in printed.stdout.splitlines())
    return {name: shlex.split(command) for name, _, command in lines}


@pytest.mark.parametrize("variables", [{}, {"SMOKE": "1"}])
def test_every_command_can_be_given(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.chdir(ROOT)
    commands = [words[1:] for words in steps(**variables).values() if words[0] == "stateline"]
    on_gpu = set() if variables else {"check"}
    assert {name for name, *_ in commands} == {"bench", "train", "compare"} | on_gpu
    for name, *arguments in commands:
        parser = Parser(prog=name, print_config=None)
        import_module(f"stateline.cli.{name}").add_arguments(parser)
        given = read_recipe(arguments, parser) if name == "train" else parser.parse_args(arguments)
        for pattern in getattr(given, "patterns", None) or ():
            assert parse_pattern(_named(pattern)[1])


def test_the_tests_of_a_device_are_there() -> None:
    for words in steps("tests").values():
        assert words[:2] == ["-m", "pytest"]
        paths = [word for word in words if word.startswith("tests/")]
        assert paths
        assert all((ROOT / path).exists() for path in paths)


def test_the_models_have_the_sizes_that_are_claimed() -> None:
    every = steps()
    decode = every["decode-bfloat16"]
    for named in decode[decode.index("--patterns") + 1 : decode.index("--out")]:
        config = ModelConfig(_named(named)[1], vocab_size=50304, d_model=2048)
        assert 1.2e9 < count_parameters(config) < 1.5e9
    hybrid = every["train-hybrid-125m"]
    width = int(hybrid[hybrid.index("--model.d_model") + 1])
    config = ModelConfig(hybrid[2], vocab_size=256, d_model=width)
    assert 1.2e8 < count_parameters(config) < 1.3e8


def test_steps_are_chosen_by_how_their_names_begin() -> None:
    assert {*steps("decode", "stair")} == {"decode-float32", "decode-bfloat16", "staircase"}


def run_with(fake: str, folder: Path, *names: str, **variables: str) -> tuple[int, str]:
    """Run steps on a machine without ``.venv``, whose Python is a shell script."""
    python = folder / "python"
    python.write_text("#!/bin/sh\n" + fake)
    python.chmod(0o755)
    own = {"SMOKE": "1", "PYTHON": str(python), "RUNS": str(folder / "runs"), "OPS": "attention"}
    done = subprocess.run(
        [SCRIPT, *names],
        env={**os.environ, **own, "OUT": str(folder / "out"), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_step_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    """One that fails is done again, at most three times; the others run all the same."""
    fake = f'[ "$1" = -c ] && exit 0\necho "$3" >> {tmp_path}/calls\n[ "$3" != train ]\n'
    found = [run_with(fake, tmp_path, "train-hybrid", "decode") for _ in range(4)]
    calls = (tmp_path / "calls").read_text().split()
    assert calls == ["bench", "bench", "train", "train", "train"]
    assert [code for code, _ in found] == [1, 1, 1, 0]
    assert "1 steps failed, 0 are not finished, 0 were given up" in found[2][1]
    assert "given up after three calls: train-hybrid-125m" in found[3][1]


def test_a_call_ends_in_time_and_another_machine_goes_on(tmp_path: Path) -> None:
    """The first step is done, the second is stopped, the third is not begun."""
    slow = (
        '[ "$1" = -c ] && exit 0\n'
        'case "$*" in *float32*attention*) mkdir -p "${@: -1}"; echo {} > "${@: -1}/ops.json";;\n'
        "*) exec sleep 60;; esac\n"
    )
    fake = slow.replace("#!/bin/sh", "").replace("${@: -1}", str(tmp_path / "runs/results/ops"))
    code, said = run_with(fake, tmp_path, "ops-float32-attention", "layers", "decode", BUDGET="16")
    assert code == 0
    assert "0 steps failed, 3 are not finished" in said
    packed = tmp_path / "out" / "gpu.tar.gz"
    with tarfile.open(packed) as archive:
        assert {"./results/ops/ops.json", "./log.txt", "./done/ops-float32-attention"} <= {
            *archive.getnames()
        }
    other = tmp_path / "other"
    other.mkdir()
    code, said = run_with("exit 0\n", other, "ops", "decode", PACKED=str(packed))
    assert code == 0
    assert "+ ops-float32-attention" not in said
    assert "+ decode-float32" in said


def test_a_machine_without_our_packages_is_told_what_is_missing(tmp_path: Path) -> None:
    fake = "echo \"ModuleNotFoundError: No module named 'msgspec'\" >&2\nexit 1\n"
    code, said = run_with(fake, tmp_path)
    assert code == 2
    assert "No module named 'msgspec'" in said
    assert "benchmarks/gpu.sh wheels" in said


@pytest.mark.slow
def test_every_command_runs_at_a_tiny_size(tmp_path: Path) -> None:
    variables = {"SMOKE": "1", "RUNS": str(tmp_path / "runs"), "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        [SCRIPT], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert len([*tmp_path.glob("runs/results/*/*.json")]) == len(
        [name for name, words in steps(**variables).items() if words[1] == "bench"]
    )
