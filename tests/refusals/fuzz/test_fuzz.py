"""No input makes the command line crash, hang, print a traceback or harm what was there."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.refusals.fuzz.cases import case
from tests.refusals.fuzz.fixed import FIXED, WORKS

ROOT = Path(__file__).parents[3]
ALL = 300

Ask = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="session")
def ask() -> Iterator[Ask]:
    """Run a case in a process of its own, forked from one that has imported everything."""
    command = [sys.executable, "-m", "tests.refusals.fuzz", "--serve"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as server:

        def answer(name: str) -> dict[str, Any]:
            server.stdin.write(json.dumps({"case": name, "seed": 0}) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield answer
        server.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(WORKS)), ids=WORKS)
def test_the_commands_that_are_mutated_work(ask: Ask, number: int) -> None:
    outcome = ask(f"works:{number}")
    assert outcome["faults"] == []
    assert outcome["code"] == 0, outcome["error"]


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.slow
def test_what_once_did_harm_does_none(ask: Ask, name: str) -> None:
    outcome = ask(name)
    assert outcome["faults"] == [], outcome["error"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(ALL))
def test_a_wrong_input_is_refused_in_one_line_and_does_no_harm(ask: Ask, number: int) -> None:
    outcome = ask(str(number))
    assert outcome["faults"] == [], f"{outcome['title']}: {outcome['command']}\n{outcome['error']}"


def test_cases_are_drawn_from_the_seed() -> None:
    commands = [case(0, number).command for number in range(60)]
    assert commands == [case(0, number).command for number in range(60)]
    assert len(set(commands)) > 40
    assert commands != [case(1, number).command for number in range(60)]
