"""Retrieval and Pathfinder of the Long Range Arena, and the area under the ROC curve."""

from pathlib import Path

import numpy as np
import pytest
import torch

from stateline.errors import InputError
from stateline.tasks import RowsTask, make_task
from stateline.tasks.objective import Classes, Ranked
from stateline.tasks.signals.pathfinder import Pathfinder, read_grey
from tests.tasks.small_data import grey_png, task_on


def made(name: str, folder: Path, seed: int = 0, **keywords: object) -> RowsTask:
    folder.mkdir(exist_ok=True)
    task = make_task(task_on(name, folder, **keywords), seed=seed)
    assert isinstance(task, RowsTask)
    return task


def test_a_pair_is_two_texts_and_a_separator(tmp_path: Path) -> None:
    task = made("retrieval", tmp_path, max_len=5)
    row, label = task.training_rows.inputs[3], task.training_rows.labels[3]
    assert bytes(row[row < 256].tolist()).decode() == "ré0 ré0 "
    assert row.tolist().index(256) == 5
    assert (label, task.vocab_size, task.objective.describe()["classes"][1]) == (1, 257, "cited")
    assert len(task.held_out_rows.inputs) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"GIF89a" + data, "cannot identify image file"),
        (lambda data: data[:25] + b"\2" + data[26:], "cannot identify image file"),
        (lambda data: data[:-200], "image file is truncated"),
        (lambda data: data[:40], "."),
        (lambda data: data[:60] + bytes(20) + data[80:], "."),
    ],
)
def test_damaged_images_are_described(change, message: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "a.png").write_bytes(change(grey_png(rng.integers(256, size=(40, 50)))))
    with pytest.raises(InputError, match=f"pathfinder cannot read .*a.png: .*{message}"):
        Pathfinder.read(tmp_path / "a.png", read_grey)


def test_images_are_read_if_they_are_grey_and_not_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(0).integers(256, size=(6, 7))
    (tmp_path / "a.png").write_bytes(grey_png(pixels))
    assert (read_grey(tmp_path / "a.png") == pixels).all()
    (tmp_path / "b.png").write_bytes(grey_png(np.zeros((6, 7, 3))))
    monkeypatch.setattr("stateline.tasks.signals.pathfinder.LARGEST", 41)
    for name in ("a.png", "b.png"):
        with pytest.raises(ValueError, match="in grey with 8 bits per pixel, of at most 41 pixels"):
            read_grey(tmp_path / name)


def test_images_are_divided_in_the_same_way_for_all_seeds(tmp_path: Path) -> None:
    one = made("pathfinder", tmp_path / "a", held_out="valid")
    other = made("pathfinder", tmp_path / "b", seed=3, held_out="test")
    parts = (one.training_rows, one.held_out_rows, other.held_out_rows)
    assert [len(part.inputs) for part in parts] == [16, 2, 2]
    rows = [pair for part in parts for pair in zip(part.inputs, part.labels, strict=True)]
    assert {row.shape for row, _ in rows} == {(12, 1)}
    by_brightness = sorted(rows, key=lambda pair: float(pair[0][-1, 0] - pair[0][0, 0]))
    assert [label for _, label in by_brightness] == [0, 1] * 10


def area(scores: list[float], classes: list[int]) -> float:
    pairs = [
        (a > b) + (a == b) / 2
        for a, one in zip(scores, classes, strict=True)
        for b, other in zip(scores, classes, strict=True)
        if one > other
    ]
    return sum(pairs) / len(pairs)


def test_the_area_under_the_curve_is_that_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    objective = Ranked(["no", "yes"])
    scores, classes = rng.integers(6, size=40) / 2 - 1, rng.integers(2, size=40)
    outputs = torch.stack([torch.zeros(40), torch.from_numpy(scores).float()], dim=1)
    targets = torch.from_numpy(classes)
    tallies = [
        objective.tally(outputs[part, None], targets[part, None])
        for part in (slice(0, 11), slice(11, 40))
    ]
    found = objective.score(objective.total(tallies))
    assert found["auroc"] == pytest.approx(area(scores.tolist(), classes.tolist()))
    plain = Classes(["no", "yes"]).tally(outputs[:, None], targets[:, None])
    assert found["accuracy"] == pytest.approx(float(plain[0] / plain[1]))


def test_seizures_are_scored_by_the_area_and_five_sets_are_not(tmp_path: Path) -> None:
    task = made("eeg", tmp_path, target="seizure", metric="auroc")
    assert task.metric == "auroc"
    with pytest.raises(InputError, match="auroc needs two classes, got 5"):
        made("eeg", tmp_path / "again", metric="auroc")
