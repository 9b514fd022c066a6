import math
from collections.abc import Iterator, Mapping

import pytest
import torch

from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import IGNORE, Batch, ConsecutiveBatch, CorpusTask, GeneratedTask, Problems

VOCAB = 5


def successor_model() -> LanguageModel:
    """A model that after n expects n + 1, and after the last token the first."""
    config = ModelConfig("feed_forward", VOCAB, VOCAB, tie_embeddings=False)
    made = LanguageModel(config)
    with torch.no_grad():
        made.embedding.weight.copy_(torch.eye(VOCAB))
        made.stack.links[0].layer.out_proj.weight.zero_()
        made.head.weight.copy_(torch.eye(VOCAB).roll(1, dims=0))
    return made


class Counting(GeneratedTask):
    """Count on from a number; of batch i, the first i answers of 4 end with a wrong token."""

    metric = "accuracy"
    vocab_size = VOCAB

    def train_batch(self, index: int) -> Batch:
        raise NotImplementedError

    def problems(self, length: int, index: int) -> Problems:
        numbers = (torch.arange(4)[:, None] + torch.arange(length + 3)) % VOCAB
        answers = numbers[:, length:].clone()
        answers[:index, -1] = (answers[:index, -1] + 1) % VOCAB
        return Problems(numbers[:, :length], answers)


class Numbers(CorpusTask):
    """Two batches of different sizes, with targets that nobody scores."""

    metric = "bits"
    vocab_size = VOCAB

    def train_batch(self, index: int) -> Batch:
        raise NotImplementedError

    def consecutive_batch(self, index: int) -> ConsecutiveBatch:
        raise NotImplementedError

    def held_out(self, length: int) -> Iterator[Batch]:
        yield Batch(torch.tensor([[0, 1, 2], [4, 3, 3]]), torch.tensor([[1, 2, 3], [0, 0, IGNORE]]))
        yield Batch(torch.tensor([[2, 2, 2]]), torch.tensor([[1, IGNORE, IGNORE]]))

    def baselines(self) -> Mapping[str, float]:
        raise NotImplementedError


def test_a_model_that_is_always_right_scores_one() -> None:
    assert evaluate(successor_model(), Counting(), 4, batches=1) == {"accuracy": 1.0}


def test_bits_per_token_become_bits_per_byte() -> None:
    task = Numbers()
    task.bytes_per_token = 4.0
    uniform = successor_model()
    torch.nn.init.zeros_(uniform.head.weight)
    wanted = math.log2(VOCAB) / 4
    assert evaluate(uniform, task, 3, batches=0)["bits"] == pytest.approx(wanted)


def test_the_score_is_the_mean_over_the_batches() -> None:
    assert evaluate(successor_model(), Counting(), 4, batches=3) == {
        "accuracy": pytest.approx((1 + 0.75 + 0.5) / 3)
    }


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary() -> None:
    uniform = successor_model()
    torch.nn.init.zeros_(uniform.head.weight)
    assert evaluate(uniform, Numbers(), 3, batches=0)["bits"] == pytest.approx(math.log2(VOCAB))


def bits_by_hand() -> tuple[float, float]:
    """Bits of a right and of a wrong successor: the embedding is normalised, then compared."""
    deviation = math.sqrt((1 / VOCAB) * (1 - 1 / VOCAB) + 1e-5)
    right, wrong = (1 - 1 / VOCAB) / deviation, (-1 / VOCAB) / deviation
    total = math.log(math.exp(right) + (VOCAB - 1) * math.exp(wrong))
    return (total - right) / math.log(2), (total - wrong) / math.log(2)


def test_every_scored_target_weighs_the_same() -> None:
    right, wrong = bits_by_hand()
    found = evaluate(successor_model(), Numbers(), 3, batches=0)
    assert found == {"bits": pytest.approx((4 * right + 2 * wrong) / 6)}


def test_a_corpus_is_read_as_far_as_asked() -> None:
    right, wrong = bits_by_hand()
    found = evaluate(successor_model(), Numbers(), 3, batches=1)
    assert found == {"bits": pytest.approx((4 * right + wrong) / 5)}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("task", [Counting(), Numbers()], ids=["generated", "corpus"])
def test_the_mode_is_as_it_was_and_evaluation_inside(
    task: Counting | Numbers, training: bool
) -> None:
    made = successor_model().train(training)
    modes: set[bool] = set()
    made.norm.register_forward_hook(lambda module, *_: modes.add(module.training))
    evaluate(made, task, 4, batches=1)
    assert modes == {False}
    assert made.training is training


def test_the_mode_is_as_it_was_after_a_mistake() -> None:
    made = successor_model().train()
    with pytest.raises(InputError):
        evaluate(made, Counting(), 0)
    assert made.training
