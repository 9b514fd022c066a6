"""What a comparison costs is told before, and limited."""

from pathlib import Path

import pytest

from stateline.cli import main
from stateline.compare import Comparison, compare
from stateline.compare.forecast import forecast, seconds_per_update
from stateline.errors import InputError
from stateline.runs.job import Job
from stateline.tasks import Task

RECALL = "associative_recall(length=4, batch_size=4)"

SWEPT = Comparison(["lstm"], [RECALL], d_model=8, steps=8, seeds=2)


def test_runs_trials_and_updates_are_counted_without_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three trials of 2 of 8 updates, of which two go on, and two runs: 34 updates."""

    def second(_: Job, __: Task) -> float:
        return 1.0

    monkeypatch.setattr("stateline.compare.forecast.seconds_per_update", second)
    (before,) = forecast(SWEPT, tmp_path)
    assert (before.runs, before.trials, before.done, before.seconds) == (2, 3, 0, 34.0)
    assert before.memory > 0
    assert list(tmp_path.iterdir()) == []
    compare(SWEPT, tmp_path, workers=0, timing="none")
    (after,) = forecast(SWEPT, tmp_path)
    assert (after.done, after.seconds) == (5, 0.0)


def test_an_update_takes_time() -> None:
    from stateline.compare import plan
    from stateline.tasks import make_task

    assert 0 < seconds_per_update(plan(SWEPT)[0], make_task(RECALL)) < 10


def test_after_its_minutes_a_comparison_ends_with_what_it_has_and_goes_on(tmp_path: Path) -> None:
    one = Comparison(["lstm"], [RECALL], d_model=8, steps=1, protocol="quick", seeds=3, minutes=0)
    first = compare(one, tmp_path, workers=0, timing="none")
    assert (first.finished, len(first.runs) < 3) == (False, True)
    whole = Comparison(["lstm"], [RECALL], d_model=8, steps=1, protocol="quick", seeds=3)
    last = compare(whole, tmp_path, workers=0, timing="none")
    assert (last.finished, len(last.runs)) == (True, 3)


def test_the_options_are_told_where_they_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["compare", "lstm", "--tasks", RECALL, "--d_model", "8", "--steps", "1"]
    quick += ["--protocol", "quick", "--workers", "0", "--timing", "none"]
    assert main([*quick, "--dry_run"]) == 0
    assert "At most 1 run and 0 trials" in " ".join(capsys.readouterr().out.split())
    assert not Path("runs").exists()
    assert main([*quick, "--minutes", "0", "--seeds", "2"]) == 0
    assert "--minutes 0 are over: the same command goes on." in capsys.readouterr().out


@pytest.mark.parametrize("name", ["minutes", "budget_minutes"])
def test_a_negative_time_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} must be at least 0, got -1"):
        forecast(Comparison(["lstm"], [RECALL], decide="best", **{name: -1.0}), Path())  # type: ignore[arg-type]
