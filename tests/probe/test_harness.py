"""Probes as tasks of lm-evaluation-harness get the scores of ``stateline probe``."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from stateline.data import ByteTokenizer
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.probe import Material, Plan, Settings, StatelineReader, make_examples, run_probes
from stateline.probe.harness import harness_settings
from tests.probe.test_probe import Oracle

pytestmark = [
    pytest.mark.slow,  # importing lm-eval takes seconds
    pytest.mark.usefixtures("unannotated"),
    pytest.mark.filterwarnings("default"),
]

N = 12


def harness_scores(lm: Any, task: str, length: int, material: Material) -> tuple[float, float]:
    from lm_eval import evaluator
    from lm_eval.api.task import ConfigurableTask

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    reader = Oracle()
    given = {"material": material, "encode": reader.encode, "decode": reader.decode}
    examples = make_examples(task, length, N, **given)
    longest = max(len(reader.encode(example.prompt)) for example in examples)
    made = ConfigurableTask(config=harness_settings(task, examples, longest_prompt=longest))
    made.set_config(key="num_fewshot", value=0)
    found = evaluator.evaluate(lm=lm, task_dict={task: made}, bootstrap_iters=0)
    (scores,) = found["results"].values()
    return scores["exact_match,none"], scores["f1,none"]


def our_scores(reader: Any, task: str, length: int, sources: Path) -> tuple[float, float]:
    plan = Plan(["oracle"], [task], [length], Settings(batches=1, examples=N))
    (point,) = run_probes(plan, Material(sources), lambda _: reader, Path("out")).points
    return point.mean, point.mean_f1


@pytest.mark.parametrize(("task", "length"), [("letters", 20), ("phone_book", 3), ("copy", 20)])
def test_the_scores_of_a_scripted_model_agree(
    task: str, length: int, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.api.model import LM

    class Scripted(LM):
        def __init__(self) -> None:
            super().__init__()
            self.oracle = Oracle()

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            texts = []
            for number, request in enumerate(requests):
                prompt, settings = request.args
                text = self.oracle._continue(prompt, settings["until"][0])
                texts.append(text if number % 3 else "wrong")
            return texts

        def loglikelihood(self, requests: Any) -> Any:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    monkeypatch.chdir(tmp_path)
    match, f1 = harness_scores(Scripted(), task, length, Material(sources))
    assert match == pytest.approx(2 / 3)
    assert f1 >= match - 1e-9


def test_the_scores_of_a_model_agree(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stateline.evaluate.harness.model import StatelineLM

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig("lstm", 256, 16)).eval()
    with torch.no_grad():  # writes the letter "a" and spaces, so that some words are right
        model.embedding.weight.mul_(20)
    reader = StatelineReader("oracle", model, ByteTokenizer(), frozenset())
    wanted = our_scores(reader, "letters", 30, sources)
    found = harness_scores(StatelineLM(model, ByteTokenizer()), "letters", 30, Material(sources))
    assert found == pytest.approx(wanted)
