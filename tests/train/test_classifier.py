"""Classifiers train, go on and are scored as language models are."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stateline.compare import Comparison, compare
from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.models.checkpoint import load_classifier
from stateline.models.sequence_head import SequenceClassifier
from stateline.tasks import IGNORE, RowsTask, make_task
from stateline.train.config import TrainConfig
from stateline.train.loop import train
from tests.tasks.small_data import task_on

CONFIG = TrainConfig(steps=6, lr=0.01, eval_every=0, log_every=1, save_every=3)


@pytest.fixture(params=["spoken_digits", "byte_text"])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> RowsTask:
    made = make_task(task_on(request.param, tmp_path))
    assert isinstance(made, RowsTask)
    return made


PATTERNS = ["s4d", "bidirectional(s4d)"]


def new_model(
    task: RowsTask, seed: int = 0, pattern: str = "s4d", **settings: Any
) -> SequenceClassifier:
    torch.manual_seed(seed)
    return SequenceClassifier(task.model_config(pattern, {"d_model": 8, **settings}))


def answers(model: SequenceClassifier, task: RowsTask) -> list[tuple[int, int]]:
    """Class and answer of every held-out row, each read by itself."""
    rows = task.held_out_rows
    with torch.inference_mode():
        inputs = (torch.as_tensor(row)[None] for row in rows.inputs)
        found = [int(model.classify(row).argmax()) for row in inputs]
    return list(zip(rows.labels, found, strict=True))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_first_loss_is_that_of_the_classes_of_the_first_batch(
    task: RowsTask, pattern: str, recompute: bool
) -> None:
    model = new_model(task, pattern=pattern)
    x, targets = map(torch.as_tensor, task.train_batch(0))
    asked = targets != IGNORE
    with torch.no_grad():
        logits = model.classify(x, asked.float().argmax(dim=1) + 1)
        expected = F.cross_entropy(logits, targets[asked]).item()
    result = train(model, task, dataclasses.replace(CONFIG, checkpoint_activations=recompute))
    assert result.curve[0].loss == pytest.approx(expected, rel=1e-5)
    assert result.tokens == sum(task.train_batch(n).targets.numel() for n in range(6))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_score_is_the_share_of_all_held_out_rows(task: RowsTask, pattern: str) -> None:
    task.batch_size = 3  # the last batch is a smaller one
    model = new_model(task, pattern=pattern).eval()
    with torch.no_grad():
        model.head.bias[task.held_out_rows.labels[0]] += 1  # so that some answers are right
    pairs = answers(model, task)
    right = sum(label == answer for label, answer in pairs) / len(pairs)
    assert 0 < right < 1
    assert evaluate(model, task, task.train_length, batches=1) == {"accuracy": pytest.approx(right)}


def test_it_learns_small_data_by_heart(task: RowsTask) -> None:
    model = new_model(task)
    result = train(model, task, dataclasses.replace(CONFIG, steps=80, warmup_steps=5))
    assert result.curve[-1].loss < 0.3 * result.curve[0].loss


def test_a_run_that_goes_on_ends_with_the_same_weights(task: RowsTask, tmp_path: Path) -> None:
    whole, stopped, resumed = (new_model(task, seed) for seed in (0, 0, 1))
    train(whole, task, CONFIG)
    train(stopped, task, CONFIG, folder=tmp_path, interrupted=iter([False, False, True]).__next__)
    train(resumed, task, CONFIG, folder=tmp_path)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert one.equal(other)


def test_segments_do_not_change_a_loss(task: RowsTask) -> None:
    losses = [
        train(new_model(task), task, dataclasses.replace(CONFIG, steps=1, segment_len=length))
        for length in (None, 3)
    ]
    first, cut = (result.curve[0].loss for result in losses)
    assert cut == pytest.approx(first, rel=1e-5)


def test_nothing_is_carried_from_row_to_row(task: RowsTask) -> None:
    with pytest.raises(InputError, match="carry_state needs a task whose batches continue"):
        train(new_model(task), task, dataclasses.replace(CONFIG, carry_state=True))


@pytest.mark.usefixtures("one_process", "quick_speed")
def test_classifiers_are_compared_and_kept(tmp_path: Path) -> None:
    spec = task_on("listops", tmp_path)
    comparison = Comparison(["s4d", "lstm"], [spec], d_model=8, steps=2, protocol="quick")
    results = compare(comparison, tmp_path / "out", command="")
    (length,) = results.tasks[0].eval_lengths
    for run in results.runs:
        assert 0 <= (run.by_length[length]["accuracy"] or 0) <= 1
    assert {entry.model for entry in results.speed} == {"s4d", "lstm"}
    folders = sorted((tmp_path / "out" / "runs").iterdir())
    assert {load_classifier(folder).config.n_classes for folder in folders} == {10}


def test_a_loss_by_chunks_is_for_language_models(task: RowsTask) -> None:
    with pytest.raises(InputError, match="loss_chunk is for language models, got a classifier"):
        train(new_model(task), task, dataclasses.replace(CONFIG, loss_chunk=8))
