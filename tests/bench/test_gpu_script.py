"""The one command that produces the figures of a GPU: every command in it can be given."""

import os
import shlex
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from stateline.bench.run import _named
from stateline.cli import Parser
from stateline.cli.train import read_recipe
from stateline.models.config import ModelConfig
from stateline.models.pattern import parse_pattern
from stateline.models.size import count_parameters
from stateline.ops import OPS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def steps(*names: str, **variables: str) -> dict[str, list[str]]:
    """The command of every step; with the names of ops, the script starts no Python."""
    known = {} if "SMOKE" in variables else {"OPS": " ".join(OPS)}
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
        assert words[:3] == ["python", "-m", "pytest"]
        paths = [word for word in words if word.startswith("tests/")]
        assert paths
        assert all((ROOT / path).exists() for path in paths)


def test_the_models_have_the_sizes_that_are_claimed() -> None:
    every = steps()
    decode = every["decode-bfloat16"]
    for named in decode[decode.index("--patterns") + 1 : decode.index("--out")]:
        config = ModelConfig(_named(named)[1], vocab_size=50304, d_model=2048)
        assert 1.2e9 < count_parameters(config) < 1.5e9
    hybrid = every["hybrid-125m"]
    width = int(hybrid[hybrid.index("--model.d_model") + 1])
    config = ModelConfig(hybrid[2], vocab_size=256, d_model=width)
    assert 1.2e8 < count_parameters(config) < 1.3e8


def test_steps_are_chosen_by_how_their_names_begin() -> None:
    assert {*steps("decode", "six")} == {"decode-float32", "decode-bfloat16", "six-30m"}


def test_a_step_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    """One that fails or is stopped is done again; the others run all the same."""
    fake = tmp_path / "stateline"
    fake.write_text('#!/bin/sh\necho "$*" >> "$RUNS/calls"\n[ "$1" != compare ]\n')
    fake.chmod(0o755)
    given = {**os.environ, "SMOKE": "1", "BIN": str(tmp_path), "RUNS": str(tmp_path)}
    codes = []
    for _ in range(2):
        done = subprocess.run(
            [SCRIPT, "six", "decode"], env=given, capture_output=True, text=True, check=False
        )
        codes.append(done.returncode)
    calls = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == ["bench", "bench", "compare", "compare"]
    assert codes == [1, 1]
    assert "1 steps failed, 0 are not finished" in done.stdout


@pytest.mark.slow
def test_every_command_runs_at_a_tiny_size(tmp_path: Path) -> None:
    variables = {"SMOKE": "1", "RUNS": str(tmp_path), "OUT": str(tmp_path / "figures")}
    done = subprocess.run(
        [SCRIPT], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert len([*tmp_path.glob("figures-*/*.json")]) == len(
        [name for name, words in steps(**variables).items() if words[1] == "bench"]
    )
