"""What other parts may ask of a task in place of its class."""

import pytest
import torch

from stateline import InputError
from stateline.evaluate import evaluate, score_task
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import (
    TASKS,
    Batch,
    CorpusTask,
    GeneratedTask,
    LabelledTask,
    Task,
    make_task,
)


class Own(Task):
    metric = "own"

    def train_batch(self, index: int) -> Batch:
        raise NotImplementedError


@pytest.fixture
def model() -> LanguageModel:
    return LanguageModel(ModelConfig("lstm", vocab_size=4, d_model=8))


@pytest.mark.parametrize("name", TASKS)
def test_attributes_tell_what_classes_tell(name: str) -> None:
    kind = TASKS[name]
    assert kind.decodes == issubclass(kind, GeneratedTask)
    assert kind.has_text == issubclass(kind, CorpusTask)
    assert kind.carries_state == (kind.consecutive_batch is not Task.consecutive_batch)
    assert kind.drawn == issubclass(kind, GeneratedTask | LabelledTask)


def test_a_kind_that_nobody_can_score_is_one_line(model: LanguageModel) -> None:
    with pytest.raises(InputError, match=r"no way to score a Own .*score_task.register"):
        evaluate(model, Own(), 3)


def test_a_kind_of_ones_own_is_scored_by_the_function_registered_for_it(
    model: LanguageModel,
) -> None:
    class Registered(Own):
        pass

    @score_task.register(Registered)
    def score(
        task: Registered, model: LanguageModel, length: int, batches: range
    ) -> dict[str, float]:
        assert not model.training
        return {"own": float(length * len(batches))}

    model.train()
    assert evaluate(model, Registered(), 3, batches=2) == {"own": 6.0}
    assert model.training


def test_positions_of_problems_are_those_of_prompt_and_answer() -> None:
    task = make_task("copying")
    assert isinstance(task, GeneratedTask)
    prompts, answers = task.problems(20, 0)
    assert task.positions(20) == prompts.shape[1] + answers.shape[1] - 1
    task.check()


def test_the_default_loss_is_the_summed_cross_entropy_of_the_targets_that_count() -> None:
    logits = torch.randn(2, 3, 4)
    targets = torch.tensor([[1, -100, 2], [-100, 0, 3]])
    chosen = torch.log_softmax(logits, 2)[targets != -100]
    expected = -chosen[torch.arange(4), targets[targets != -100]].sum()
    torch.testing.assert_close(Own().loss(logits, targets), expected)
    assert Own().asked(targets).sum() == 4


@pytest.mark.parametrize(
    ("task", "low", "high"),
    [
        ("word_problem(length=16)", 1 / 6 - 0.02, 1 / 6 + 0.03),
        ("copying", 0.0, 0.0),
        ("copying(mixed=true)", 0.0, 0.01),
        ("induction_head", 1 / 18 - 0.015, 1 / 18 + 0.015),
        ("induction_head(vocab_size=202)", 0.0, 0.01),
        ("ngram_lookup", 0.0, 0.0),
        ("multi_query_recall", 1 / 64 - 0.004, 1 / 64 + 0.004),
        ("object_collision(length=8, batch_size=1)", 0.0, 0.0),
    ],
)
def test_chance_is_what_one_answer_to_everything_gets(task: str, low: float, high: float) -> None:
    assert low <= make_task(task).chance() <= high
