"""Tasks that ask for labels, from training to the report."""

import json
from pathlib import Path

import pytest
import torch

from stateline.cli import main
from stateline.evaluate import evaluate, evaluate_by_position
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import IGNORE, Batch, LabelledTask

VOCAB = 5


def successor_model() -> LanguageModel:
    """A model that says n + 1 at n, and at the last token the first."""
    made = LanguageModel(ModelConfig("feed_forward", VOCAB, VOCAB, tie_embeddings=False))
    with torch.no_grad():
        made.embedding.weight.copy_(torch.eye(VOCAB))
        made.stack.links[0].layer.out_proj.weight.zero_()
        made.head.weight.copy_(torch.eye(VOCAB).roll(1, dims=0))
    return made


class Successors(LabelledTask):
    """Asks for successors at all but the first position; of batch i, the last i are others."""

    def train_batch(self, index: int) -> Batch:
        raise NotImplementedError

    def labelled(self, length: int, index: int) -> Batch:
        tokens = torch.arange(length).repeat(2, 1) % VOCAB
        targets = (tokens + 1) % VOCAB
        targets[:, 0] = IGNORE
        targets[:, length - index :] = tokens[:, length - index :]
        return Batch(tokens, targets)


def test_a_model_is_scored_at_the_positions_that_are_asked() -> None:
    assert evaluate(successor_model(), Successors(), 8, batches=1) == {
        "accuracy": 1.0,
        "last_quarter_accuracy": 1.0,
    }


def test_all_labels_of_all_batches_weigh_the_same() -> None:
    assert evaluate(successor_model(), Successors(), 8, batches=3) == {
        "accuracy": pytest.approx(1 - 3 / 21),
        "last_quarter_accuracy": pytest.approx(1 - 3 / 6),
    }


def test_accuracies_come_by_position_in_buckets_that_double() -> None:
    """The first, of which nothing is asked, is left out."""
    assert evaluate_by_position(successor_model(), Successors(length=8), 8, batches=3) == {
        2: 1.0,
        4: 1.0,
        8: pytest.approx(1 - 3 / 12),
    }


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stateline.runs.score.EVAL_BATCHES", 1)
    task = "word_problem(length=16, batch_size=4)"
    options = ["--model.d_model", "8", "--train.steps", "3", "--train.eval_every", "1"]
    assert main(["train", "lstm", "--task", task, "--out", "run", *options]) == 0
    found: dict[str, object] = json.loads(Path("run/results.json").read_text())
    return found


def test_a_run_is_scored_by_length_and_by_position(results: dict[str, list[dict]]) -> None:  # type: ignore[type-arg]
    (run,) = results["runs"]
    assert list(run["by_length"]) == ["16", "32", "64"]
    assert set(run["by_length"]["64"]) == {"accuracy", "last_quarter_accuracy"}
    assert list(run["by_position"]) == ["2", "4", "8", "16", "32", "64"]


@pytest.mark.usefixtures("results")
def test_the_report_shows_accuracy_by_position_and_by_step() -> None:
    assert main(["report", "run"]) == 0
    page = Path("run/report.html").read_text(encoding="utf-8")
    for title in ("accuracy by position", "accuracy during training"):
        assert f"<figcaption>Word problem: {title}</figcaption>" in page


@pytest.mark.parametrize("task", ["algorithm(statements=5, length=16)", "random_walk(reset=true)"])
def test_streams_are_trained_with_carried_state(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateline.runs.score.EVAL_BATCHES", 1)
    options = ["--model.d_model", "8", "--train.steps", "3", "--train.carry_state", "true"]
    assert main(["train", "lstm", "--task", task, "--out", str(tmp_path), *options]) == 0
