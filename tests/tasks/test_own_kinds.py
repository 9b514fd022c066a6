"""Kinds of tasks that are not ours train, hold out, score and report like ours."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stateline import (
    Comparison,
    InputError,
    LanguageModel,
    ModelConfig,
    TrainConfig,
    make_task,
    register_task,
)
from stateline.cli import main
from stateline.compare import compare
from stateline.evaluate import evaluate, score_positions, score_task
from stateline.evaluate.losses import Buckets
from stateline.runs.results import Results
from stateline.tasks import TASKS, Batch, GeneratedTask, LabelledTask, Problems, Task, generator
from stateline.train.loop import train

SCORED: list[range] = []
"""Numbers of the evaluation batches of the drawn task, by call."""

FILES: list[list[int]] = []
"""The files that the finite task was scored on, by call."""


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
    FILES.append(task.files)
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
    FILES.clear()
    yield
    del TASKS["own_drawn"], TASKS["own_finite"]


class Halves(GeneratedTask):
    """Its answers are 0, 0, 0 in the first half, and 0, 1, 1 in the second."""

    train_length = 1

    def train_batch(self, index: int) -> Batch:
        raise NotImplementedError

    def problems(self, length: int, index: int) -> Problems:
        answers = torch.tensor([0, 0, 0, 0, 1, 1])[:, None]
        return Problems(answers, answers)


def test_chance_scores_the_answer_of_each_half_on_the_other() -> None:
    assert Halves().chance(batches=1) == 1 / 6


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
    assert FILES[: len(finite.trials)] == [[3]] * len(finite.trials)
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


def lstm() -> LanguageModel:
    return LanguageModel(ModelConfig("lstm", vocab_size=2, d_model=4))


ROWS = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 0]])


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (
            (ROWS, ROWS[:, -1]),
            "batches of Odd must be a tensor of inputs .* and torch.int64 of .2,",
        ),
        ((ROWS, ROWS[:, 1:]), "got torch.int64 of .2, 4. and torch.int64 of .2, 3."),
        ((ROWS.numpy(), ROWS), "got ndarray and torch.int64"),
        ((ROWS, ROWS + 1), "targets must be from 0 to 1, or -100"),
        ((ROWS, ROWS.where(ROWS == 0, -1)), "targets must be from 0 to 1, or -100"),
    ],
)
def test_a_batch_without_a_target_for_each_position_is_refused(
    batch: tuple[Any, Any], told: str
) -> None:
    class Odd(Own):
        def train_batch(self, index: int) -> Batch:
            return Batch(*batch)

    with pytest.raises(InputError, match=told):
        train(lstm(), Odd(), TrainConfig(steps=1))


def test_targets_may_be_int32() -> None:
    class Narrow(Drawn):
        def train_batch(self, index: int) -> Batch:
            return Batch(ROWS, ROWS.int())

    assert train(lstm(), Narrow(), TrainConfig(steps=1)).steps == 1


@pytest.mark.parametrize("answers", [ROWS[:, 0], ROWS[:1, :1], ROWS.numpy()])
def test_problems_of_unequal_shapes_are_refused(answers: Any) -> None:
    """One answer for all prompts would be compared with every decoded one."""

    class Odd(GeneratedTask):
        metric, train_length, eval_lengths = "accuracy", 4, (4,)

        def train_batch(self, index: int) -> Batch:
            return Batch(ROWS, ROWS)

        def problems(self, length: int, index: int) -> Problems:
            return Problems(ROWS, answers)

    for call in (Odd().check, lambda: evaluate(lstm(), Odd(), 4)):
        with pytest.raises(InputError, match="problems of Odd must be prompts, a tensor of shape"):
            call()


def test_problems_may_be_a_plain_pair(tmp_path: Path) -> None:
    class Pair(Own, GeneratedTask):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.metric = "accuracy"

        def problems(self, length: int, index: int) -> Any:
            return ROWS, ROWS[:, :1]

    register_task("own_pair", Pair)
    try:
        (run,) = compared(tmp_path, "own_pair").runs
    finally:
        del TASKS["own_pair"]
    assert "accuracy" in run.by_length[4]


def test_labels_of_unequal_shapes_are_refused() -> None:
    class Odd(LabelledTask):
        def draw(self, rng: Any, count: int, length: int, *, training: bool) -> Batch:
            return Batch(ROWS, ROWS[:, :1])

    with pytest.raises(InputError, match="batches of Odd must be a tensor of inputs"):
        evaluate(lstm(), Odd(), 4)


def test_scores_are_numbers() -> None:
    class Tensors(Drawn):
        pass

    @score_task.register
    def _tensors(task: Tensors, model: Any, length: int, batches: range) -> dict[str, Any]:
        return {"share_right": torch.tensor(0.5)}

    assert type(evaluate(lstm(), Tensors(), 4)["share_right"]) is float


@pytest.mark.parametrize("lengths", [(), (8, 16), (4.0, 8)])
def test_lengths_that_results_cannot_hold_are_refused(
    lengths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(self: Drawn, seed: int = 0) -> None:
        Own.__init__(self, seed)
        self.eval_lengths = lengths

    monkeypatch.setattr(Drawn, "__init__", init)
    with pytest.raises(
        InputError, match="eval_lengths of Drawn must be whole numbers with train_le"
    ):
        make_task("own_drawn")
