"""``evaluate RUN --task``: a run scored on its own or another task, at any lengths."""

import json
from pathlib import Path

import pytest

from stateline.cli import main
from stateline.evaluate import evaluate
from stateline.models.checkpoint import load_model
from stateline.tasks import make_task

OWN = "copying(max_len=4, context_len=12, batch_size=4)"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("evaluate") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stateline.runs.score.EVAL_BATCHES", 1)
        options = ["--model.d_model", "8", "--train.steps", "2", "--out", folder]
        assert main(["train", "lstm", "--task", OWN, *options]) == 0
    return folder


def scores(out: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(out.read_text())["scores"]
    return found


@pytest.mark.parametrize("task", [["--task", "own"], [], ["--task", OWN]])
def test_a_run_is_scored_on_its_own_task_at_any_lengths(
    run: str, task: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    options = ["--lengths", "4", "7", "--batches", "2", "--out", str(out)]
    assert main(["evaluate", run, *task, *options]) == 0
    model = load_model(run)
    for length in (4, 7):
        assert scores(out)[str(length)] == evaluate(model, make_task(OWN), length, batches=2)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["length", "string", "accuracy", "character", "accuracy"]
    assert len(shown) == 3


def test_without_lengths_those_of_the_task_are_taken(run: str, tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    task = "copying(max_len=9, context_len=22)"
    assert main(["evaluate", run, "--task", task, "--batches", "1", "--out", str(out)]) == 0
    assert [int(n) for n in scores(out)] == list(make_task(task).eval_lengths)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "give either text files, --task or --tasks"),
        ("text.txt --task own", "give either text files, --task or --tasks"),
        ("--task own --batches 0", "batches and lengths must be at least 1"),
        ("--lengths 0", "batches and lengths must be at least 1"),
        ("--task copyng", "unknown task 'copyng': did you mean 'copying'"),
        ("--task text(path=RUN/config.yaml)", "needs a model of vocab_size 256, and the run has"),
    ],
)
def test_mistakes_are_named(
    run: str, options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", run, *options.replace("RUN", run).split()]) == 2
    assert message in capsys.readouterr().err
