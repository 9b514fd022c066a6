"""Averages of weights, the best checkpoint, early stopping, and updates that are skipped."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.models.checkpoint import load_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.runs.single import run_single, single_job
from stateline.tasks import Text, make_task
from stateline.train.config import TrainConfig
from stateline.train.folder import found
from stateline.train.loop import Trainer, train
from stateline.train.metrics import METRICS, TrainingDiverged, TrainResult
from stateline.train.optimizer import OPTIMIZERS
from stateline.train.update import Updater

EVERY_STEP = {"steps": 8, "warmup_steps": 0, "log_every": 1, "eval_every": 1, "save_every": 3}


def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig("h3 lstm", vocab_size=256, d_model=8))


def run(
    text: Text, folder: Path | None = None, until: int = 99, **settings: Any
) -> tuple[LanguageModel, TrainResult]:
    """Train, or go on; stop after ``until`` steps in all."""
    done = max((int(path.name[5:]) for path in found(folder)), default=0) if folder else 0
    steps, trained = iter(range(done + 1, 100)), model()
    config = TrainConfig(**{**EVERY_STEP, **settings})
    result = train(trained, text, config, folder=folder, interrupted=lambda: next(steps) >= until)
    return trained, result


def same(one: LanguageModel, other: LanguageModel) -> bool:
    return all(p.equal(q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The scores that a run gets, in place of its own; lower is better."""
    given: list[float] = []

    def score(self: Trainer) -> float:
        return given[self.progress.steps - 1]

    monkeypatch.setattr(Trainer, "_score", score)
    return given


def test_the_average_follows_its_equation(text: Text) -> None:
    weights = [list(run(text, steps=n, schedule="constant")[0].parameters()) for n in (1, 2, 3)]
    averaged, _ = run(text, steps=3, schedule="constant", ema=0.75)
    for first, second, third, mean in zip(*weights, averaged.parameters(), strict=True):
        wanted = 0.75 * (0.75 * first + 0.25 * second) + 0.25 * third
        torch.testing.assert_close(mean, wanted, rtol=2**-22, atol=2**-22)


def test_scores_are_of_the_average_and_leave_training_as_it_was(text: Text) -> None:
    _, plain = run(text)
    _, averaged = run(text, ema=0.5)
    assert [line.loss for line in plain.curve] == [line.loss for line in averaged.curve]
    assert [line.metric for line in plain.curve] != [line.metric for line in averaged.curve]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_with_averages_goes_on_to_the_bit(text: Text, tmp_path: Path, optimizer: str) -> None:
    whole, _ = run(text, tmp_path / "whole", ema=0.9, optimizer=optimizer)
    run(text, tmp_path / "cut", until=4, ema=0.9, optimizer=optimizer)
    again, _ = run(text, tmp_path / "cut", ema=0.9, optimizer=optimizer)
    finished, _ = run(text, tmp_path / "cut", ema=0.9, optimizer=optimizer)
    assert same(whole, again)
    assert same(whole, finished)


@pytest.mark.parametrize("until", [2, 5, 99])
def test_the_model_at_the_end_is_that_of_the_best_score(
    text: Text, tmp_path: Path, scores: list[float], until: int
) -> None:
    scores += [3.0, 1.0, 2.0, 2.0, 2.0, math.inf, 2.0, 2.0]
    run(text, tmp_path, until=until, keep_best=True, keep=1)
    best, result = run(text, tmp_path, keep_best=True, keep=1)
    assert (result.best, result.best_step) == (1.0, 2)
    assert [path.name for path in found(tmp_path)] == ["step-00000002", "step-00000008"]
    assert same(best, load_model(tmp_path / "checkpoints/step-00000002"))


def test_the_best_score_of_averages_gives_the_averages(
    text: Text, tmp_path: Path, scores: list[float]
) -> None:
    scores += [3.0, 1.0, 2.0]
    best, _ = run(text, tmp_path, steps=3, schedule="constant", keep_best=True, ema=0.5)
    wanted, _ = run(text, steps=2, schedule="constant", ema=0.5)
    assert same(best, wanted)


def test_the_best_score_may_be_that_of_another_length(text: Text, tmp_path: Path) -> None:
    best, result = run(text, tmp_path, keep_best=True, best_length=5)
    assert result.best == evaluate(best, text, 5, training=True)[text.metric]
    assert result.best != evaluate(best, text, text.train_length, training=True)[text.metric]
    with pytest.raises(InputError, match="best_length chooses by keep_best or patience"):
        TrainConfig(best_length=5)


def test_training_stops_after_scores_that_are_no_better(text: Text, scores: list[float]) -> None:
    scores += [3.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    _, result = run(text, patience=2)
    assert (result.stopped, result.steps) == ("stalled", 6)


def test_what_chooses_a_model_is_not_what_it_is_scored_on(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(97 + n * n % 23 for n in range(4000)))
    spec = f"text(path={file}, length=16, batch_size=4)"
    task = make_task(spec)
    config = TrainConfig(steps=2, warmup_steps=0, eval_every=1, patience=5)
    job = single_job(task, spec, "lstm", training=config, model={"d_model": 8})
    result = run_single(job, tmp_path / "run", task=task)
    assert result.validation is not None
    assert result.validation != result.by_length[16]["bits_per_byte"]


class Broken:
    """Makes the gradients of some updates NaN."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
        read = Updater._read

        def broken(update: Updater, losses: Any, norm: Any) -> tuple[float, float]:
            loss, size = read(update, losses, norm)
            return loss, math.nan if self.step in steps else size

        call = Updater.__call__

        def counted(update: Updater, micro_batches: Any, step: int) -> tuple[float, float]:
            self.step = step
            return call(update, micro_batches, step)

        monkeypatch.setattr(Updater, "_read", broken)
        monkeypatch.setattr(Updater, "__call__", counted)


@pytest.mark.parametrize("carry", [False, True])
def test_skipped_updates_are_counted_and_resumed_to_the_bit(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carry: bool
) -> None:
    Broken(monkeypatch, 1, 2, 5)
    settings = {"max_skipped": 2, "carry_state": carry, "save_every": 1}
    whole, result = run(text, tmp_path / "whole", **settings)
    run(text, tmp_path / "cut", until=2, **settings)
    again, _ = run(text, tmp_path / "cut", **settings)
    assert (result.skipped, result.stopped) == (3, "finished")
    assert same(whole, again)
    lines = map(json.loads, (tmp_path / "whole" / METRICS).read_text().splitlines())
    assert [line["skipped"] for line in lines] == [0, 2, 2, 3, 3]


def test_a_skipped_update_leaves_the_weights(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    Broken(monkeypatch, 0, 1, 2)
    trained, _ = run(text, steps=3, max_skipped=3)
    assert same(trained, model())


def test_too_many_skipped_updates_in_a_row_end_the_run(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    Broken(monkeypatch, 1, 2, 3)
    with pytest.raises(TrainingDiverged, match="gradient became nan at step 4"):
        run(text, max_skipped=2)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"ema": 1.0}, "wants ema to be a finite number from 0 to below 1 or none"),
        ({"patience": 0}, "wants patience to be int of at least 1 or none, got 0"),
        ({"patience": 2, "eval_every": 0}, "need scores: set eval_every above 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        TrainConfig(**settings)


def test_the_best_checkpoint_needs_a_folder(text: Text) -> None:
    with pytest.raises(InputError, match="keep_best keeps a checkpoint: give a folder"):
        run(text, keep_best=True)
