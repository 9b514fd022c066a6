"""Data to choose settings with: no part of what is scored, no part of what is trained on."""

from pathlib import Path

import numpy as np
import pytest
import torch

from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.models.config import ModelConfig
from stateline.models.factory import make_model
from stateline.tasks import Batch, CorpusTask, RowsTask, Task, make_task
from tests.tasks.small_data import task_on


def rows_of(task: RowsTask) -> tuple[set[bytes], set[bytes]]:
    parts = (task.training_rows, task.held_out_rows)
    return tuple({row.tobytes() for row in part.inputs} for part in parts)  # type: ignore


def test_rows_are_held_out_from_training_and_the_scored_ones_are_left_alone(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5, 1)).astype(np.float32), rng.integers(0, 2, 60)
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    spec = f"signals(path={tmp_path / 'rows.npz'}, batch_size=4)"
    task, tried = make_task(spec), make_task(spec, seed=7)
    assert isinstance(task, RowsTask)
    assert isinstance(tried, RowsTask)
    assert "held out from training" in tried.hold_out_validation()
    (training, scored), (kept, held_out) = rows_of(task), rows_of(tried)
    assert kept | held_out == training
    assert not kept & held_out
    assert not held_out & scored
    assert len(held_out) == len(training) // 10
    again = make_task(spec, seed=8)
    again.hold_out_validation()
    assert isinstance(again, RowsTask)
    assert rows_of(again) == (kept, held_out)


def windows(task: CorpusTask) -> list[int]:
    return [
        token
        for batch in task.held_out(16)
        for token in batch.targets.flatten().tolist()
        if token >= 0
    ]


def test_the_end_of_the_training_text_is_held_out(tmp_path: Path) -> None:
    text = "".join(chr(97 + int(n)) for n in np.random.default_rng(0).integers(0, 26, 3000))
    (tmp_path / "text").write_text(text)
    spec = f"text(path={tmp_path / 'text'}, length=16, batch_size=2)"
    task, tried = make_task(spec), make_task(spec)
    assert isinstance(tried, CorpusTask)
    assert isinstance(task, CorpusTask)
    assert tried.hold_out_validation().startswith("the last 270 of 2,700 training tokens")
    assert bytes(windows(tried)).decode() == text[2430 + 1 : 2700]
    assert bytes(windows(task)).decode() == text[2700 + 1 :]
    seen = "".join(
        bytes(row).decode()
        for index in range(200)
        for row in tried.train_batch(index).tokens.tolist()
    )
    assert text[2440:2456] not in seen
    read = bytes(torch.cat([tried.consecutive_batch(i).tokens[-1] for i in range(60)]).tolist())
    assert text[2440:2450].encode() not in read


def test_too_little_to_hold_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("ab" * 14)
    task = make_task(f"text(path={tmp_path / 'text'}, length=24, batch_size=1)")
    with pytest.raises(InputError, match=r"choosing settings needs .* use the protocol quick"):
        task.hold_out_validation()
    rows = make_task(task_on("listops", tmp_path))
    assert isinstance(rows, RowsTask)
    rows.batch_size = len(rows.training_rows.inputs)
    with pytest.raises(InputError, match="lower batch_size or use the protocol quick"):
        rows.hold_out_validation()


@pytest.mark.parametrize("spec", ["copying(batch_size=8)", "word_problem(batch_size=8)"])
def test_a_model_is_scored_on_other_problems_while_it_is_trained(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(spec)
    name = "problems" if task.decodes else "labelled"
    asked: list[int] = []
    draw = getattr(type(task), name)
    monkeypatch.setattr(
        type(task), name, lambda self, n, index: asked.append(index) or draw(self, n, index)
    )
    model = make_model(ModelConfig("lstm", task.vocab_size, d_model=4))
    evaluate(model, task, task.train_length, batches=3)
    assert asked == [0, 1, 2]
    asked.clear()
    evaluate(model, task, task.train_length, batches=3, training=True)
    assert asked == [2**20, 2**20 + 1, 2**20 + 2]  # recorded curves were scored on these


def test_a_task_that_does_not_say_what_to_hold_out_is_refused() -> None:
    class Own(Task):
        def train_batch(self, index: int) -> Batch:
            raise NotImplementedError

    with pytest.raises(InputError, match=r"chosen on a Own, .* or use the protocol quick"):
        Own().hold_out_validation()
