"""Options that several commands share."""

import importlib
from collections.abc import Callable

import pytest

from stateline.cli import COMMANDS, Parser, main

COMPUTES = {"compare", "train", "evaluate", "generate", "capacity", "check", "bench", "probe"}
COMPUTES |= {"distill", "reproduce", "serve"}
READS_OR_WRITES = {"data", "report", "info", "convert", "export"}
Refused = Callable[..., str]


def options(command: str) -> set[str]:
    """All option strings of a command."""
    parser = Parser(prog=f"stateline {command}")
    importlib.import_module(f"stateline.cli.{command}").add_arguments(parser)
    return set(parser._option_string_actions)


def test_every_command_either_computes_or_not() -> None:
    assert set(COMMANDS) - COMPUTES - READS_OR_WRITES == set()


@pytest.mark.parametrize("command", sorted(COMPUTES))
def test_every_command_that_computes_has_a_device(command: str) -> None:
    assert "--device" in options(command)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", sorted(COMPUTES))
def test_a_device_that_is_not_there_is_one_line(command: str, refused: Refused) -> None:
    needed = {"compare": "h3 --tasks copying", "train": "h3 --task copying"}
    needed |= {"evaluate": "run book.txt", "generate": "run --prompt to", "bench": "ops"}
    needed |= {"serve": "run", "distill": "run --pattern h3 --text book.txt"}
    assert "tpu" in refused(f"{command} {needed.get(command, 'h3')} --device tpu")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("spec", ["nowhere.py", "no_module_of_this_name"])
def test_every_command_imports_the_users_code(
    command: str, spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--import", spec]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stateline: error: ")
    assert spec in line
