"""Classifiers on the command line."""

from pathlib import Path

import pytest

from stateline.cli import main
from stateline.models.checkpoint import load_classifier
from tests.tasks.small_data import task_on

TRAINING = ["--train.steps", "2", "--model.d_model", "8", "--model.pooling", "last"]


@pytest.fixture
def trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    out = str(tmp_path / "run")
    task = task_on("spoken_digits", tmp_path)
    assert main(["train", "lstm", "--task", task, "--out", out, *TRAINING]) == 0
    assert capsys.readouterr().out.endswith(f"the model is in {out}\n")
    return out


def test_a_classifier_is_trained_and_kept(trained: str) -> None:
    config = load_classifier(trained).config
    assert (config.n_channels, config.n_classes, config.pooling) == (8, 10, "last")
    assert Path(trained, "results.json").exists()


@pytest.mark.parametrize("command", [["generate", "--prompt", "12"], ["evaluate", __file__]])
def test_what_classifies_does_not_write(
    trained: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *others = command
    assert main([name, trained, *others]) == 2
    assert "and stateline evaluate --task scores it" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["s4d", "bidirectional(s4d)"])
def test_a_dry_run_counts_positions(
    pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = task_on("eeg", tmp_path, frame=4)
    assert main(["train", pattern, "--task", task, "--dry_run"]) == 0
    assert "an update       4 x 8 tokens" in capsys.readouterr().out


def test_pooling_is_for_classifiers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "s4d", "--task", "copying", "--model.pooling", "mean"]) == 2
    assert "pooling is for tasks with one target per sequence" in capsys.readouterr().err
