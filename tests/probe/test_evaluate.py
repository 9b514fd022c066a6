"""``stateline evaluate --tasks`` gives probes the scores of ``stateline probe``."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stateline.cli import main
from stateline.models.checkpoint import save_model
from stateline.models.config import ModelConfig
from stateline.models.constructions.ngram_copier import ngram_copier
from stateline.models.language_model import LanguageModel
from stateline.probe import PROBES, Material, is_probe, score_probe
from tests.probe.test_probe import Oracle

pytestmark = pytest.mark.usefixtures("unannotated")

N = 12


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Partly(Oracle):
    """Right, unless the bytes of the prompt sum up to a multiple of three."""

    def _continue(self, prompt: str, stop: str) -> str:
        return super()._continue(prompt, stop) if sum(prompt.encode()) % 3 else "wrong 1"


def both_ways(model: Path, sources: Path, *tasks: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Exact match and F1 by task and length, from ``evaluate`` and from ``probe``.

    In float64: where two answers are equally likely, as after letters that occur twice, rounding in
    float32 decides, and it differs between the 8 rows of ``evaluate`` and the 16 of ``probe``.
    """
    data = ["--data", str(sources), "--device", "cpu", "--dtype", "float64"]
    scores = ["--limit", str(N), "--out", "scores.json"]
    assert main(["evaluate", str(model), "--tasks", *tasks, *data, *scores]) == 0
    evaluated: dict[str, Any] = {}
    for score in json.loads(Path("scores.json").read_text())["scores"]:
        evaluated.setdefault(score["task"], {})[score["name"]] = score["value"]
    probed = {}
    for task in tasks:
        probe, length = task.rsplit("_", 1)
        sizes = ["--lengths", length, "--error", "0", "--examples", str(N)]
        assert main(["probe", str(model), "--tasks", probe, *sizes, *data]) == 0
    for point in json.loads(Path("runs/probes/probes.json").read_text())["points"]:
        scores_of = {name: point[name] for name in ("exact_match", "f1")}
        probed[f"{point['task']}_{point['length']}"] = scores_of
    return evaluated, probed


@pytest.mark.slow
def test_evaluate_and_probe_give_a_model_that_copies_the_same_scores(sources: Path) -> None:
    save_model(ngram_copier(4, n_letters=252), "copier")  # its letters are bytes
    tasks = ["phone_book_5", "copy_40", "shuffled_copy_30", "letters_20", "squad_50"]
    evaluated, probed = both_ways(Path("copier"), sources, *tasks)
    assert evaluated == {task: pytest.approx(scores) for task, scores in probed.items()}
    assert 0 < evaluated["letters_20"]["exact_match"] < 1
    assert all(evaluated[task]["f1"] > 0 for task in tasks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pythia", "mamba"])
def test_answers_end_at_the_same_token_in_both_ways(name: str, tiny: Path, sources: Path) -> None:
    evaluated, probed = both_ways(tiny / name, sources, "copy_20", "squad_50", "phone_book_3")
    assert evaluated == {task: pytest.approx(scores) for task, scores in probed.items()}


def test_a_name_without_a_length_asks_for_all_of_the_probes_own(sources: Path) -> None:
    found = score_probe(Oracle(), "letters", Material(sources), limit=2)
    lengths = PROBES["letters"].lengths
    assert [metric.task for metric in found[::2]] == [f"letters_{length}" for length in lengths]
    assert [metric.name for metric in found[:2]] == ["exact_match", "f1"]
    assert {metric.examples for metric in found} == {2}
    assert not is_probe("letter")
    assert not is_probe("letters_0")


def test_the_standard_error_is_that_of_the_mean_over_examples(sources: Path) -> None:
    match, _ = score_probe(Partly(), "letters_20", Material(sources), limit=N)
    p = match.value
    assert 0 < p < 1
    assert match.stderr == pytest.approx((p * (1 - p) / (N - 1)) ** 0.5)


def test_answers_have_the_room_that_the_model_has_in_both_ways(sources: Path) -> None:
    torch.manual_seed(0)
    config = ModelConfig("attention", 256, 16, max_len=60)
    save_model(LanguageModel(config), "short")
    evaluated, probed = both_ways(Path("short"), sources, "letters_9")
    assert evaluated == {task: pytest.approx(scores) for task, scores in probed.items()}


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("letters_50", "letters_50 needs 301 tokens; the model was made for 60: take a lower len"),
        ("phone_bok", "did you mean 'phone_book'"),
        ("letters_9 --limit 0", "limit must be at least 1, got limit=0"),
        ("copy_20", "give --data a folder that holds text/"),
    ],
)
def test_a_probe_that_cannot_be_run_is_one_line(
    task: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(LanguageModel(ModelConfig("attention", 256, 16, max_len=60)), "short")
    assert main(["evaluate", "short", "--tasks", *task.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
