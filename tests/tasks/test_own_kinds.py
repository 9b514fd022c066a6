"""Kinds of tasks that are not ours train, hold out, score and report like ours."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stateline import Comparison, register_task
from stateline.cli import main
from stateline.compare import compare
from stateline.evaluate import score_positions, score_task
from stateline.evaluate.losses import Buckets
from stateline.runs.results import Results
from stateline.tasks import TASKS, Batch, Task, generator

SCORED: list[range] = []
"""Numbers of the evaluation batches of the drawn task, by call."""


class Own(Task):
    """The next bit is the last one. It says no more than a task must."""

    def __init__(self, seed: int = 0) -> None:
        self.metric = "share_right"
        self.seed, self.batch_size, self.vocab_size = seed, 2, 2
        self.train_length, self.eval_lengths = 4, (4, 8)

    def train_batch(self, index: int) -> Batch:
        return self.bits("train", index, self.train_length)

    def bits(self, split: str, index: int, length: int) -> Batch:
        drawn = generator(self.seed, split, index).integers(2, size=(2, 1))
        tokens = torch.from_numpy(drawn).expand(2, length)
        return Batch(tokens, tokens)


class Drawn(Own):
    drawn = True


class Finite(Own):
    """Scored on three fixed batches, or on one that is held out from training."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.files = [0, 1, 2]

    def hold_out_validation(self) -> str:
        self.files = [3]
        return "the fourth file"

    def problems_scored(self, batches: int) -> int:
        return 2 * len(self.files)


@score_task.register
def _drawn(task: Drawn, model: Any, length: int, batches: range) -> dict[str, float]:
    SCORED.append(batches)
    return _right(task, model, length, batches)


@score_task.register
def _finite(task: Finite, model: Any, length: int, batches: range) -> dict[str, float]:
    return _right(task, model, length, task.files) | {"files": float(sum(task.files))}


def _right(task: Own, model: Any, length: int, numbers: range | list[int]) -> dict[str, float]:
    rows = [task.bits("eval", number, length) for number in numbers]
    right = [(model(tokens).argmax(2) == targets).float().mean() for tokens, targets in rows]
    return {"share_right": float(torch.stack(right).mean())}


@score_positions.register
def _by_position(task: Finite, model: Any, buckets: Buckets, batches: range) -> dict[int, float]:
    return {4: 0.25}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_task("own_drawn", Drawn)
    register_task("own_finite", Finite)
    SCORED.clear()
    yield
    del TASKS["own_drawn"], TASKS["own_finite"]


def compared(folder: Path, task: str, **settings: Any) -> Results:
    comparison = Comparison(["lstm"], [task], d_model=4, steps=4, seeds=1, **settings)
    return compare(comparison, folder, workers=0, timing="none", device="cpu")


def test_a_drawn_task_is_scored_on_new_problems_at_the_end(tmp_path: Path) -> None:
    results = compared(tmp_path, "own_drawn", protocol="quick")
    *while_training, four, eight = SCORED
    assert while_training
    assert four == eight
    assert not {*four} & {number for batches in while_training for number in batches}
    (run,) = results.runs
    assert run.validation is not None  # not one of the final problems: settings may follow from it
    assert list(run.by_length) == [4, 8]


def test_settings_are_chosen_on_problems_of_another_seed_or_on_what_is_held_out(
    tmp_path: Path,
) -> None:
    drawn = compared(tmp_path / "drawn", "own_drawn", lrs=[0.1, 0.2])
    assert drawn.protocol is not None
    assert drawn.protocol.validation == {"own_drawn": "problems drawn from another seed"}
    assert [trial.chosen for trial in drawn.trials].count(True) == 1
    finite = compared(tmp_path / "finite", "own_finite", lrs=[0.1, 0.2])
    assert finite.protocol is not None
    assert finite.protocol.validation == {"own_finite": "the fourth file"}
    assert all(trial.validation is not None for trial in finite.trials)
    (run,) = finite.runs
    assert run.by_length[4]["files"] == 3.0  # the final score is on the other three
    assert run.validation is None  # while it trains, a finite task is scored on the same problems
    assert run.by_position == {4: 0.25}


def test_a_task_of_ones_own_has_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["--train.steps", "2", "--model.d_model", "4", "--device", "cpu"]
    for task in ("own_drawn", "own_finite"):
        out = str(tmp_path / task)
        assert main(["train", "lstm", "--task", task, "--out", out, *train]) == 0
        assert main(["evaluate", out, "--task", "own"]) == 0
    folders = [str(tmp_path / task) for task in ("own_drawn", "own_finite")]
    assert main(["report", *folders, "--out", str(tmp_path / "page")]) == 0
    shown = capsys.readouterr().out
    assert "share right" in shown
    page = (tmp_path / "page" / "report.html").read_text()
    assert "own_drawn" in page
    assert "own_finite" in page


def test_a_training_setting_of_ones_own_task_that_is_unknown_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Drawn, "training", {"stepz": 3})
    assert main(["train", "lstm", "--task", "own_drawn", "--out", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "setting of the training of own_drawn 'stepz': did you mean 'steps'?" in line
