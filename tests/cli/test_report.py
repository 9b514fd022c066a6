import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stateline.cli import main
from stateline.reports import read_results, write_report

CURVE = [{"step": 100, "loss": 1.0, "metric": 0.5}, {"step": 200, "loss": 0.1, "metric": 1.0}]


def stored(folder: Path, model: str = "h3*2", **changes: object) -> Path:
    """A folder as written by a training run."""
    task = {
        **dict.fromkeys(["spec", "name", "title", "about"], "copying"),
        "metric": "accuracy",
        "higher_is_better": True,
        "solved_at": 0.9,
        "train_length": 10,
        "eval_lengths": [10, 20],
        "data": {},
        "baselines": {},
    }
    run = {
        **{"model": model, "task": "copying", "seed": 0, "d_model": 64, "steps": 200},
        **{"stopped": "finished", "seconds": 3.0, "tokens_per_second": 1e4},
        **{"parameters": 1000, "parameters_wanted": 1000, "steps_to_solve": 200},
        "curve": CURVE,
        "by_length": {"10": {"accuracy": 1.0}, "20": {"accuracy": 0.7}},
        "training": {"lr": 0.004},
    }
    results = {
        "format": "stateline-results-1",
        "command": f"stateline train {shlex.quote(model)}",
        **{"created": "2026-11-21T08:00:00+00:00", "finished": True, "environment": {}},
        **{"models": [model], "tasks": [task | changes], "runs": [run], "speed": []},
    }
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_a_run_gets_its_report_into_its_own_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "1 model trained with 1 seed on 1 task: copying." in shown
    assert shown.endswith(f"\nreport: {folder}/report.html\n")
    page = (folder / "report.html").read_text()
    assert "<h1>Stateline: h3*2</h1>" in page
    assert "stateline train &#39;h3*2&#39;" in page
    assert "<summary>Training configuration</summary>" in page


def test_the_report_of_one_run_is_the_one_that_was_written_with_it(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run")
    write_report(read_results(folder), tmp_path / "report.html")
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_bytes() == (tmp_path / "report.html").read_bytes()


def test_charts_are_exported_in_the_formats_that_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, charts = stored(tmp_path / "run"), tmp_path / "charts"
    assert main(["report", str(folder), "--export", str(charts), "--format", "csv", "json"]) == 0
    assert capsys.readouterr().out.endswith(f"charts: 6 files in {charts}\n")
    names = ["by-length", "loss", "while-training"]
    assert sorted(path.name for path in charts.iterdir()) == [
        f"copying-{name}.{form}" for name in names for form in ("csv", "json")
    ]


def test_several_runs_get_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stored(tmp_path / "a")
    stored(tmp_path / "b", "lstm*2")
    assert main(["report", "a", "b"]) == 0
    assert (
        "2 models matched in parameters, trained with the same settings" in capsys.readouterr().out
    )
    page = (tmp_path / "runs" / "report" / "report.html").read_text()
    assert "stateline train &#39;h3*2&#39;" in page
    assert "stateline train &#39;lstm*2&#39;" in page
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["results.json"]


def test_a_report_goes_where_it_is_told(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run")
    assert main(["report", str(folder), "--out", str(tmp_path / "far" / "away")]) == 0
    assert (tmp_path / "far" / "away" / "report.html").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["results.json"]


MISTAKES = [
    ([], "the following arguments are required: runs"),
    (["nowhere"], "no results in nowhere: results.json is missing; give the folder of"),
    (["file"], "no results in file: results.json is missing; give the folder of"),
    (["broken"], "broken/results.json is damaged: Expecting value: line 1"),
    (["next"], "cannot use next/results.json: the format must be 'stateline-results-1', got 'stat"),
    (["good", "./good"], "each folder must be given once, got good twice"),
    (["good", "other"], "got train_length 20 in other and 10 before"),
    (["good", "--out", "file/report"], "cannot write file/report/report.html: "),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[m[1][:30] for m in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("good", "broken", "next"):
        stored(tmp_path / name)
    stored(tmp_path / "other", train_length=20)
    (tmp_path / "file").write_text("")
    (tmp_path / "broken" / "results.json").write_text("")
    (tmp_path / "next" / "results.json").write_text('{"format": "stateline-results-2"}')
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("stateline: error: ")
    assert message in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_learning_rate_that_is_no_number_is_a_dash(tmp_path: Path) -> None:
    folder = stored(tmp_path / "run")
    results = json.loads((folder / "results.json").read_text())
    results["runs"][0]["training"]["lr"] = ""
    (folder / "results.json").write_text(json.dumps(results))
    assert main(["report", str(folder)]) == 0


@pytest.mark.slow  # a process of its own
def test_an_encoding_without_some_character_is_no_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stateline", "report", str(stored(tmp_path / "run"))],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"1 model trained with 1 seed" in done.stdout


@pytest.mark.slow
def test_a_budget_limits_what_is_decided_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gallery = str(Path("docs/gallery/hybrids").absolute())
    options = ["--out", str(tmp_path), "--budget", "state<=64KiB", "decode>=1k"]
    assert main(["report", gallery, *options]) == 0
    assert "Which one, within state<=64KiB and decode>=1k" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Which one, within state&lt;=64KiB and decode&gt;=1k</h2>" in page
    assert main(["report", gallery, "--budget", "size<=3"]) == 2
    assert "a budget must limit state, flops" in capsys.readouterr().err
