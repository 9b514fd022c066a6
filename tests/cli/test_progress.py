import dataclasses
import logging
from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from stateline.cli import _Log
from stateline.cli.progress import describe, show_news
from stateline.compare import Comparison, Job, Recipe, compare, plan
from stateline.models.checkpoint import save_model
from stateline.models.factory import make_model
from stateline.runs.results import RunRecord
from stateline.train.metrics import Metrics

TASK = 'text(path="[b]ooks", length=8)'
SHORT = "copying(max_len=4)"
RUN = RunRecord(
    model="h3",
    task="copying",
    seed=0,
    d_model=64,
    parameters=1000,
    parameters_wanted=1000,
    steps=70,
    stopped="finished",
    seconds=1.0,
    tokens_per_second=1.0,
    steps_to_solve=None,
    curve=[],
    by_length={8: {"bits_per_byte": 2.5}},
)


def metrics(step: int = 40, metric: float | None = 0.5, seconds_left: float = 75.0) -> Metrics:
    return Metrics(step, 70, 1.25, metric, 1e-3, 12_345.6, seconds_left)


@pytest.fixture
def jobs() -> list[Job]:
    return plan(Comparison(["h3", "lstm"], ["copying*2"], protocol="quick"))


def test_a_line_tells_how_far_how_well_and_how_fast() -> None:
    line = describe(metrics(), "bits per byte")
    wanted = "   40/70  loss 1.250  bits per byte 0.500  12,346 tokens/s  1:15 left"
    assert line == wanted


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.2, "0:00"), (59.7, "1:00"), (119.6, "2:00"), (3605.0, "60:05")]
)
def test_the_time_left_is_in_minutes_and_whole_seconds(seconds: float, shown: str) -> None:
    assert f"  {shown} left" in describe(metrics(seconds_left=seconds), "accuracy")


def told(jobs: list[Job], *, terminal: bool) -> str:
    """What is shown while the first job is trained, the last is trained, and a model is timed."""
    file = StringIO()
    with show_news(Console(file=file, width=120, force_terminal=terminal)) as news:
        news.planned(len(jobs), 1)
        for step in (10, 20):
            news.progress(jobs[0], metrics(step))
        news.finished(jobs[0], RUN)
        news.progress(jobs[-1], metrics())
        news.timing("lstm")
    return file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_it_tells_what_trains_what_is_done_and_what_is_timed(
    jobs: list[Job], terminal: bool
) -> None:
    shown = told(jobs, terminal=terminal)
    assert "copying | h3: bits_per_byte 2.500 at 8 (70 steps, finished)" in shown
    assert "measuring the speed of lstm" in shown


def test_without_a_terminal_lines_about_a_run_are_seldom(jobs: list[Job]) -> None:
    lines = told(jobs, terminal=False).splitlines()
    assert lines[0] == "4 runs, 1 of them done before"
    assert sum("loss" in line for line in lines) == 2  # one for each run that was trained
    assert any(line.startswith("2/4 copying | h3: ") for line in lines)


def test_the_score_of_a_line_is_named_by_the_metric_of_the_task(jobs: list[Job]) -> None:
    assert "  string accuracy 0.500  " in told(jobs, terminal=False)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_by_itself_is_shown_too(jobs: list[Job], terminal: bool) -> None:
    """``stateline train`` plans nothing."""
    file = StringIO()
    with show_news(Console(file=file, width=120, force_terminal=terminal)) as news:
        news.progress(jobs[0], metrics())
    assert "copying | h3" in file.getvalue()


def test_a_run_is_told_with_its_seed_unless_it_is_the_first(jobs: list[Job]) -> None:
    for job, name in zip(jobs[:2], ["copying | h3: ", "copying | h3 seed 1: "], strict=True):
        file = StringIO()
        with show_news(Console(file=file)) as news:
            news.planned(1, 0)
            news.finished(job, RUN)
        assert f"1/1 {name}" in file.getvalue()


def test_a_log_stands_above_the_bars(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the handler that was made before the display of progress took standard error."""
    handler, error, file = _Log(), StringIO(), StringIO()
    monkeypatch.setattr("sys.stderr", error)
    with show_news(Console(file=file, width=120, force_terminal=True)) as news:
        news.planned(len(jobs), 0)
        handler.emit(logging.LogRecord("stateline", 20, "", 0, "compiling", None, None))
    assert error.getvalue() == ""
    assert "compiling\n" in file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_score_that_is_none_is_told_as_such(jobs: list[Job], terminal: bool) -> None:
    outcome = {"steps": 1, "stopped": "the loss became nan"}
    diverged = replace(RUN, by_length={8: {"accuracy": None}}, **outcome)
    file = StringIO()
    with show_news(Console(file=file, width=120, force_terminal=terminal)) as news:
        news.planned(len(jobs), 0)
        news.finished(jobs[0], diverged)
    assert "copying | h3: no score at 8 (1 step, the loss became nan)" in file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_brackets_in_a_name_are_shown_as_they_are(jobs: list[Job], terminal: bool) -> None:
    named = [dataclasses.replace(jobs[0], task=TASK)]
    shown = told(named, terminal=terminal)
    assert f"{TASK} | h3: bits_per_byte" in shown
    assert shown.count("ooks") == shown.count("[b]ooks")


def test_a_comparison_names_the_new_weights_of_a_model_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old,) = plan(Comparison(["attention"], [SHORT], d_model=8, protocol="quick"))
    save_model(make_model(old.model), tmp_path / "old")
    hybrid = Recipe("h3", "hybrid", init=str(tmp_path / "old"))
    tasks = [SHORT.replace("4", "3"), SHORT]
    comparison, file = Comparison([hybrid], tasks, protocol="quick"), StringIO()
    monkeypatch.setattr("stateline.compare.run_all", lambda *_: None)
    with show_news(Console(file=file)) as news:
        compare(comparison, tmp_path / "new", news=news, timing="none")
        monkeypatch.setattr("stateline.compare.missing", lambda *_: [])  # nothing is left to train
        compare(comparison, tmp_path / "new", news=news, timing="none")
    (line,) = [line for line in file.getvalue().splitlines() if "starting from" in line]
    assert line.startswith(f"{SHORT} | hybrid: starting from the weights in {tmp_path / 'old'}; ")
    assert " of layer 0, " in line.partition("new weights: ")[2]
