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

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"


def lines() -> list[list[str]]:
    printed = subprocess.run(
        [SCRIPT], env={**os.environ, "DRY": "1"}, capture_output=True, text=True, check=True
    )
    return [shlex.split(line) for line in printed.stdout.splitlines()]


def test_every_command_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCRIPT.parents[1])
    commands = [arguments for program, *arguments in lines() if program == "stateline"]
    assert {name for name, *_ in commands} == {"bench", "train", "compare"}
    for name, *arguments in commands:
        parser = Parser(prog=name, print_config=None)
        import_module(f"stateline.cli.{name}").add_arguments(parser)
        given = read_recipe(arguments, parser) if name == "train" else parser.parse_args(arguments)
        for pattern in getattr(given, "patterns", None) or ():
            assert parse_pattern(_named(pattern)[1])


def test_the_models_that_decode_have_the_sizes_that_are_claimed() -> None:
    decode = next(line for line in lines() if line[:3] == ["stateline", "bench", "decode"])
    first = decode.index("--patterns") + 1
    for named in decode[first : decode.index("--out")]:
        config = ModelConfig(_named(named)[1], vocab_size=50304, d_model=2048)
        assert 1.2e9 < count_parameters(config) < 1.5e9
