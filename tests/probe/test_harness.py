"""Probes as tasks of lm-evaluation-harness get the scores of ``stateline probe``."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stateline.cli import main
from stateline.errors import InputError
from stateline.models.checkpoint import save_model
from stateline.models.config import ModelConfig
from stateline.models.constructions.ngram_copier import ngram_copier
from stateline.models.language_model import LanguageModel
from stateline.probe import PROBES, Material, Plan, Settings, make_examples, run_probes
from tests.probe.test_probe import Oracle

pytestmark = [
    pytest.mark.slow,  # importing lm-eval takes seconds
    pytest.mark.usefixtures("unannotated"),
    pytest.mark.filterwarnings("default"),
]

N = 12


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    level = logging.getLogger("lm_eval").level
    yield
    logging.getLogger("lm_eval").setLevel(level)


class Partly(Oracle):
    """Right, unless the bytes of the prompt sum up to a multiple of three."""

    def _continue(self, prompt: str, stop: str) -> str:
        return super()._continue(prompt, stop) if sum(prompt.encode()) % 3 else "wrong 1"


@pytest.mark.parametrize(("task", "length"), [("letters", 20), ("phone_book", 3), ("copy", 20)])
def test_the_scores_of_a_scripted_model_agree(task: str, length: int, sources: Path) -> None:
    from lm_eval import evaluator
    from lm_eval.api.model import LM

    from stateline.probe.harness import ProbeTask
    from stateline.probe.run import answer_limits

    class Scripted(LM):
        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            asked = [request.args for request in requests]
            return [Partly()._continue(prompt, given["until"][0]) for prompt, given in asked]

        def loglikelihood(self, requests: Any) -> Any:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    reader, material = Partly(), Material(sources)
    given = {"material": material, "encode": reader.encode, "decode": reader.decode}
    examples = make_examples(task, length, N, **given)
    prompts = [reader.prompt(example.prompt) for example in examples]
    limits, _ = answer_limits(reader, PROBES[task], examples, prompts)
    made = ProbeTask(task, examples, limits)
    scores = evaluator.evaluate(lm=Scripted(), task_dict={task: made}, bootstrap_iters=0)
    found = [scores["results"][task][f"{name},none"] for name in ("exact_match", "f1")]

    plan = Plan(["oracle"], [task], [length], Settings(batches=1, examples=N))
    (point,) = run_probes(plan, material, lambda _: Partly(), Path("out")).points
    assert found == pytest.approx([point.mean, point.mean_f1])
    assert 0 < found[0] < 1


def both_ways(model: Path, sources: Path, *tasks: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Exact match and F1 by task and length, from ``evaluate`` and from ``probe``."""
    data = ["--data", str(sources), "--device", "cpu"]
    scores = ["--limit", str(N), "--out", "scores.json"]
    assert main(["evaluate", str(model), "--tasks", *tasks, *data, *scores]) == 0
    theirs: dict[str, Any] = {}
    for score in json.loads(Path("scores.json").read_text())["scores"]:
        theirs.setdefault(score["task"], {})[score["name"]] = score["value"]
    ours = {}
    for task in tasks:
        probe, length = task.rsplit("_", 1)
        sizes = ["--lengths", length, "--batches", "1", "--examples", str(N)]
        assert main(["probe", str(model), "--tasks", probe, *sizes, *data]) == 0
    for point in json.loads(Path("runs/probes/probes.json").read_text())["points"]:
        name = f"{point['task']}_{point['length']}"
        ours[name] = {"exact_match": point["exact_match"][0], "f1": point["f1"][0]}
    return theirs, ours


def test_evaluate_and_probe_give_a_model_that_copies_the_same_scores(sources: Path) -> None:
    save_model(ngram_copier(4, n_letters=252), "copier")  # its letters are bytes
    tasks = ["phone_book_5", "copy_40", "shuffled_copy_30", "letters_20", "squad_50"]
    theirs, ours = both_ways(Path("copier"), sources, *tasks)
    assert theirs == {task: pytest.approx(scores) for task, scores in ours.items()}
    assert 0 < theirs["letters_20"]["exact_match"] < 1
    assert all(theirs[task]["f1"] > 0 for task in tasks)


@pytest.mark.parametrize("name", ["pythia", "mamba"])
def test_answers_end_at_the_same_token_in_both_ways(name: str, tiny: Path, sources: Path) -> None:
    theirs, ours = both_ways(tiny / name, sources, "copy_20", "squad_50", "phone_book_3")
    assert theirs == {task: pytest.approx(scores) for task, scores in ours.items()}


def test_a_name_without_a_length_asks_for_all_of_the_probes_own(sources: Path) -> None:
    from stateline.probe.harness import probe_tasks

    given = (Material(sources), Oracle())
    names = [task.task_name for task in probe_tasks("letters", *given, limit=1)]
    assert names == [f"letters_{length}" for length in PROBES["letters"].lengths]
    assert probe_tasks("letter", *given) == probe_tasks("letters_0", *given) == []
    with pytest.raises(InputError, match="limit must be at least 1, got 0"):
        probe_tasks("letters", *given, limit=0)


def test_answers_have_the_room_that_the_model_has_in_both_ways(sources: Path) -> None:
    torch.manual_seed(0)
    config = ModelConfig("attention", 256, 16, max_len=60)
    save_model(LanguageModel(config), "short")
    theirs, ours = both_ways(Path("short"), sources, "letters_9")
    assert theirs == {task: pytest.approx(scores) for task, scores in ours.items()}


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("letters_50", "letters_50 needs 300 tokens; the model was made for 60: take a lower len"),
        ("phone_bok", "did you mean 'phone_book'"),
        ("letters_9 --limit 0", "limit must be at least 1, got 0"),
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
