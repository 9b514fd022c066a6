"""Trackers: what they are told, and that a failing one costs no run."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stateline.cli import main
from stateline.compare import Comparison, compare
from stateline.compare.trackers import RunInfo, Tracked, load_tracker
from stateline.errors import InputError

RECALL = "associative_recall(length=4, batch_size=4)"

TRACKER = """
import json
from pathlib import Path

def log(run, step, scalars):
    with open(Path(__file__).parent / "log", "a") as file:
        file.write(json.dumps([run.model, run.task, run.seed, step, sorted(scalars)]) + "\\n")
"""


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateline.runs.score.EVAL_BATCHES", 1)


@pytest.fixture
def comparison() -> Comparison:
    return Comparison(["small=lstm"], [RECALL], d_model=8, steps=3, protocol="quick")


def test_a_tracker_is_told_every_line_and_the_scores(
    tmp_path: Path, comparison: Comparison
) -> None:
    told: list[tuple[RunInfo, int, Any]] = []
    tracked = Tracked(lambda run, step, scalars: told.append((run, step, dict(scalars))))
    (run,) = compare(comparison, tmp_path, workers=0, news=tracked, timing="none").runs
    (info, step, line), (again, last, scores) = told
    assert info == again
    assert (info.model, info.task, info.seed) == ("small", RECALL, 0)
    assert (tmp_path / "runs" / info.name).is_dir()
    assert info.settings["training"]["steps"] == step == last == 3
    assert {"loss", "lr", "accuracy", "tokens_per_second"} <= set(line)
    assert scores == {f"accuracy/{n}": own["accuracy"] for n, own in run.by_length.items()}


def test_a_tracker_that_fails_is_told_once_and_the_run_ends_well(
    tmp_path: Path, comparison: Comparison, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[int] = []

    def fail(run: RunInfo, step: int, scalars: Any) -> None:
        called.append(step)
        raise ConnectionError("no network")

    results = compare(comparison, tmp_path, workers=0, news=Tracked(fail), timing="none")
    assert results.finished
    assert called == [3]
    assert "not called again: ConnectionError: no network" in caplog.text


@pytest.mark.usefixtures("quick_speed")
@pytest.mark.parametrize("command", ["train", "compare"])
def test_commands_take_a_tracker_from_a_file(tmp_path: Path, command: str) -> None:
    file = tmp_path / f"{command}_tracker.py"
    file.write_text(TRACKER)
    size = ["--model.d_model", "8"] if command == "train" else ["--d_model", "8"]
    options = {
        "train": ["--task", RECALL, "--train.steps", "2"],
        "compare": ["--tasks", RECALL, "--steps", "2", "--workers", "0", "--protocol", "quick"],
    }[command]
    out = ["--out", str(tmp_path / "out"), "--tracker", f"{file}:log"]
    assert main([command, "lstm", *size, *options, *out]) == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 2
    assert '"accuracy/16"' in lines[-1]
    assert not list((tmp_path / "out").rglob("imports.json"))  # a run does not need its tracker


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("json", "must be wandb, mlflow, module:function or file.py:function, got 'json'"),
        ("nowhere:log", "cannot import nowhere"),
        ("json:log", "json has no function 'log'"),
    ],
)
def test_what_is_no_tracker_is_named(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_tracker(spec)


def test_wandb_is_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    def init(**settings: Any) -> Any:
        logged.append((settings["project"], settings["id"], settings["name"], settings["config"]))
        return SimpleNamespace(log=lambda scalars, step: logged.append((step, scalars)))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    tracker, run = load_tracker("wandb"), RunInfo("folder", "h3", "copying", 2, {"lr": 1e-3})
    tracker(run, 1, {"loss": 2.0})
    tracker(run, 2, {"loss": 1.0})
    begun = ("stateline", "folder", "h3 copying 2", {"lr": 1e-3})
    assert logged == [begun, (1, {"loss": 2.0}), (2, {"loss": 1.0})]


def test_mlflow_is_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    class Client:
        def create_run(self, experiment: str, *, run_name: str, tags: dict[str, str]) -> Any:
            logged.append((experiment, run_name, tags))
            return SimpleNamespace(info=SimpleNamespace(run_id="7"))

        def log_metric(self, run: str, name: str, value: float, *, step: int) -> None:
            logged.append((run, name, value, step))

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
    load_tracker("mlflow")(RunInfo("folder", "h3", "copying", 2, {}), 1, {"loss": 2.0})
    assert logged == [("0", "h3 copying 2", {"folder": "folder"}), ("7", "loss", 2.0, 1)]


def test_a_tracker_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"the tracker wandb needs its package: pip install wandb"):
        load_tracker("wandb")
