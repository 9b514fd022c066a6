"""The check of servers finds planted bugs, and is silent about a server that is right."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stateline
from stateline.cli import main
from stateline.errors import InputError
from stateline.serve.engine import Engine
from stateline.server_check import Answer, ServerReport, check_server, distance
from tests.serve.running import running
from tests.server_check import faults

pytestmark = [pytest.mark.usefixtures("unannotated"), pytest.mark.cpu]

MODEL = faults.model_of_letters()


def checked(plant: Callable[[Engine], None] | None = None, seed: int = 0) -> ServerReport:
    app = faults.letters_app(MODEL)
    if plant is not None:
        plant(app.state.service.engine)
    with running(app) as client:
        return check_server(client.url, borders=(15, 16, 17, 527), seed=seed)


def test_a_right_server_holds_the_law() -> None:
    report = checked()
    assert report.ok, report
    assert report.log_probs
    assert report.isolates
    assert report.effect > 10 * report.limit
    assert len(report.findings) == 7
    assert "the law holds" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 8))
def test_a_right_server_gives_no_alarm(seed: int) -> None:
    report = checked(seed=seed)
    assert report.ok, report


@pytest.mark.slow  # one of them is found by the command below
@pytest.mark.parametrize("plant", faults.FAULTS)
def test_a_planted_bug_is_found(plant: Callable[[Engine], None]) -> None:
    report = checked(plant)
    assert not report.ok, report
    assert report.conclusive
    assert "THE LAW IS BROKEN" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [faults.plant_in_streams, faults.plant_in_log_probs])
def test_a_bug_outside_of_the_engine_is_found(
    plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    report = checked()
    assert not report.ok, report
    clauses = {finding.clause for finding in report.findings if not finding.ok}
    assert clauses >= ({"streamed"} if plant is faults.plant_in_streams else set())


@pytest.mark.slow
@pytest.mark.parametrize("plant", [None, faults.skipped_token])
def test_borders_beyond_8000_tokens_are_asked(
    plant: Callable[[Engine], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateline.server_check.clauses.FLOOD", (5, 100))
    app = faults.letters_app(faults.model_of_letters(9000), memory=1 << 25, every=1024)
    if plant is not None:
        plant(app.state.service.engine)
    with running(app) as client:
        report = check_server(client.url, borders=(8319, 8320, 8321))
    behind = next(f for f in report.findings if f.clause == "behind a kept prefix")
    assert (behind.pairs, report.notes) == (6, ())
    assert behind.ok == report.ok == (plant is None), report


def test_the_command_prints_the_verdict_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateline.server_check.clauses.FLOOD", (5, 100))
    app = faults.letters_app(MODEL)
    faults.changing_state(app.state.service.engine)
    with running(app) as client:
        assert main(["check", client.url, "--json", str(tmp_path / "found.json")]) == 1
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert not found["ok"]
    assert found["sentence"] in capsys.readouterr().out
    assert {"clause", "pairs", "wrong", "worst", "where", "ok"} == set(found["findings"][0])


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "http://127.0.0.1:1/v1"]) == 2
    assert "cannot reach http://127.0.0.1:1/v1" in capsys.readouterr().err
    assert main(["check", "lstm", "--json", "x"]) == 2


def test_a_model_that_is_not_there_is_one_line() -> None:
    with running(faults.letters_app(MODEL)) as client, pytest.raises(InputError, match="404"):
        check_server(client.url, "nobody")


def answer(text: str, *likely: dict[str, float]) -> Answer:
    return Answer(text, tuple(text), likely, 1)


def test_a_near_tie_makes_a_small_difference() -> None:
    a = answer("ab", {"a": -1.0, "c": -1.001}, {"b": -0.1})
    b = answer("cx", {"a": -1.001, "c": -1.0}, {"x": -9.0})
    assert distance(a, b) == pytest.approx(0.001)


def test_another_token_that_was_unlikely_makes_a_large_difference() -> None:
    a = answer("a", {"a": -0.1, "b": -3.0})
    b = answer("b", {"b": -0.1, "a": -3.0})
    assert distance(a, b) == pytest.approx(2.9)
    hidden = answer("c", {"c": -0.1, "b": -2.0})
    assert distance(a, hidden) == pytest.approx(2.9)


def test_lost_text_is_an_infinite_difference_and_texts_alone_differ_by_one() -> None:
    a = answer("ab", {"a": 0.0}, {"b": 0.0})
    assert distance(a, a._replace(text="a")) == float("inf")
    assert distance(a, answer("a", {"a": 0.0})) == float("inf")
    assert distance(Answer("a", (), (), 1), Answer("b", (), (), 1)) == 1
    assert distance(Answer("a", (), (), 1), Answer("a\ufffd", (), (), 1)) == 0


@pytest.mark.parametrize("plant", [None, faults.changing_state])
def test_the_module_needs_the_standard_library_alone(
    plant: Callable[[Engine], None] | None, tmp_path: Path
) -> None:
    """With ``-S``, Python finds no installed package."""
    app, source = faults.letters_app(MODEL), Path(stateline.__file__).parents[1]
    if plant is not None:
        plant(app.state.service.engine)
    command = [sys.executable, "-S", "-m", "stateline.server_check"]
    file = tmp_path / "found.json"
    environment = {"PYTHONPATH": str(source)}
    with running(app) as client:
        done = subprocess.run(
            [*command, client.url, "--json", str(file)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == (0 if plant is None else 1), done
    assert json.loads(file.read_text())["sentence"] in done.stdout
    gone = subprocess.run(
        [*command, "http://127.0.0.1:1/v1"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (gone.returncode, gone.stderr.count("\n")) == (2, 1), gone
    assert "cannot reach" in gone.stderr
