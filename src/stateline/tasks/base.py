"""What a task is: it gives training batches and evaluation problems, and scores what comes back."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stateline.data import Tokenizer
from stateline.errors import InputError
from stateline.models.config import ModelConfig

IGNORE = -100
"""Target of a position that no loss or score looks at (PyTorch's own ``ignore_index``)."""

Inputs = Int[Tensor, "batch length"] | Float[Tensor, "batch length channels"]
"""Tokens, or numbers."""


class Batch(NamedTuple):
    """Input and, at each position, what should come next or its label, or else ``IGNORE``."""

    tokens: Inputs
    targets: Int[Tensor, "batch length"]


class ConsecutiveBatch(NamedTuple):
    """A batch whose rows go on where they ended in the batch before, but for the fresh ones."""

    tokens: Int[Tensor, "batch length"]
    targets: Int[Tensor, "batch length"]
    fresh: Bool[Tensor, " batch"]


class Problems(NamedTuple):
    """Prompts of one length, and for each the answer that greedy decoding should give."""

    prompts: Int[Tensor, "batch prompt"]
    answers: Int[Tensor, "batch answer"]


class Task(ABC):
    """Something a model can be trained on and scored at.

    Batches are functions of the task's seed and an index, so that the same seed gives the same
    batches on every machine, in any order, and a resumed run continues where it stopped.

    Attributes:
        title: A few words, for tables.
        about: What a good or bad score does and does not tell, in a sentence or two.
        metric: Name of the score that tables show.
        higher_is_better: Whether a larger score is a better one.
        solved_at: Score at the training length from which on the task counts as solved, and
            scores at other lengths as generalisation; ``None`` where nothing is ever solved.
        training: Keywords of the training configuration that suit the task.
        batch_size: Rows in a training batch.
        vocab_size: Number of tokens.
        train_length: Length that it trains on, in the unit in which ``eval_lengths`` counts.
        eval_lengths: Lengths that it is scored at, the training length first.
    """

    title: ClassVar[str]
    about: ClassVar[str]
    metric: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    solved_at: ClassVar[float | None] = None
    training: ClassVar[Mapping[str, float | str]]
    batch_size: int
    vocab_size: int
    train_length: int
    eval_lengths: tuple[int, ...]

    @abstractmethod
    def train_batch(self, index: int) -> Batch:
        """Training batch number ``index``."""

    def model_config(self, pattern: str, settings: Mapping[str, Any]) -> ModelConfig:
        """What a model for the task is made of: by default a language model of its tokens.

        Args:
            pattern: The layers.
            settings: Further settings of the configuration; ``pooling`` is one of classifiers, and
                ``None`` stands for what they have by default.

        Raises:
            InputError: If a setting cannot be used.
        """
        given = {name: value for name, value in settings.items() if name != "pooling"}
        if settings.get("pooling") is not None:
            raise InputError("pooling is for tasks that classify whole sequences: leave it out")
        return ModelConfig(pattern, self.vocab_size, **given)

    def describe(self) -> Mapping[str, object]:
        """What a report should record of the task's data; generated tasks have nothing to add."""
        return {}


class GeneratedTask(Task):
    """A task whose problems are drawn at random and answered by greedy decoding.

    Attributes:
        teacher_forcing: Whether every token of an answer is predicted after the true ones, in one
            pass, instead of after those decoded: milder on what follows a mistake.
    """

    teacher_forcing: bool = False

    @abstractmethod
    def problems(self, length: int, index: int) -> Problems:
        """Evaluation batch number ``index`` at ``length``; never one that training sees."""

    def score(
        self, answers: Int[Tensor, "batch answer"], predictions: Int[Tensor, "batch answer"]
    ) -> dict[str, float]:
        """Scores of one batch of decoded answers, each the mean over the batch."""
        right = answers == predictions
        return {"accuracy": right.all(dim=1).float().mean().item()}


class ConsecutiveTask(Task):
    """A task that goes on from batch to batch, for training with carried state."""

    @abstractmethod
    def consecutive_batch(self, index: int) -> ConsecutiveBatch:
        """Training batch number ``index``, whose rows go on where those before it ended."""


class ExampleTask(GeneratedTask):
    """A task of short examples, each with a target at every position.

    Attributes:
        examples: With a number, training goes again and again through so many examples, in another
            order in every epoch, as official code does; without, each is seen once.
    """

    seed: int
    examples: int | None = None

    @abstractmethod
    def draw(self, rng: np.random.Generator, count: int, length: int) -> Int[Tensor, "count total"]:
        """Some examples, of ``length`` tokens before what ends all of them."""

    def train_batch(self, index: int) -> Batch:
        """Training batch number ``index``."""
        if self.examples is None:
            rng = generator(self.seed, "train", index)
            drawn = self.draw(rng, self.batch_size, self.train_length)
        else:
            drawn = self._fixed[epoch_rows(self.seed, self.examples, self.batch_size, index)]
        return Batch(tokens=drawn[:, :-1], targets=drawn[:, 1:])

    @cached_property
    def _fixed(self) -> Int[Tensor, "count total"]:
        assert self.examples is not None
        return self.draw(generator(self.seed, "examples"), self.examples, self.train_length)


class LabelledTask(Task):
    """A task that asks at every position for a label: what holds there, given all up to it.

    So the target is not the next token. Inputs and labels share one vocabulary, inputs first, and
    lengths count tokens.
    """

    metric = "accuracy"
    solved_at = 0.97
    training: ClassVar[Mapping[str, float | str]] = {
        "steps": 3000,
        "lr": 2e-3,
        "schedule": "constant",
        "weight_decay": 0.0,
        "eval_every": 100,
        "stop_at": 0.999,
    }

    @abstractmethod
    def labelled(self, length: int, index: int) -> Batch:
        """Evaluation batch number ``index`` of ``length`` tokens; never one that training sees."""

    def score(
        self, targets: Int[Tensor, "batch length"], predictions: Int[Tensor, "batch length"]
    ) -> dict[str, float]:
        """Share of labels that are right, of all and of the last quarter of positions.

        The latter only if anything is asked for there.
        """
        right, asked = (targets == predictions).float(), targets != IGNORE
        late = slice(3 * targets.shape[1] // 4, None)
        scores = {"accuracy": right[asked].mean().item()}
        if asked[:, late].any():
            scores["last_quarter_accuracy"] = right[:, late][asked[:, late]].mean().item()
        return scores


class CorpusTask(ConsecutiveTask):
    """A task on a given text, scored by the loss on its held-out part.

    Attributes:
        tokenizer: Makes the tokens from text, and text from tokens.
        bytes_per_token: Of the held-out text; bits per token over this are bits per byte.
    """

    tokenizer: Tokenizer
    bytes_per_token: float = 1.0

    @abstractmethod
    def held_out(self, length: int) -> Iterator[Batch]:
        """The whole held-out text once, in windows of ``length`` tokens."""

    @abstractmethod
    def baselines(self) -> Mapping[str, float]:
        """The same metric for programs that need no training, on the same held-out text."""


def check_examples(examples: int | None, batch_size: int) -> None:
    """Raise InputError if a fixed number of examples does not make a batch."""
    if examples is not None and examples < batch_size:
        raise InputError(
            f"examples must be at least batch_size={batch_size}, or none for new ones in every "
            f"batch, got examples={examples}"
        )


def epoch_rows(seed: int, count: int, batch_size: int, index: int) -> Int[np.ndarray, " batch"]:
    """Which of ``count`` rows are in a batch, where every epoch has another order.

    What is left over in an epoch is passed over.
    """
    epoch, place = divmod(index, count // batch_size)
    order = generator(seed, "train", epoch).permutation(count)
    return order[place * batch_size :][:batch_size]


def generator(seed: int, split: str, *index: int) -> np.random.Generator:
    """Random numbers for one batch, fixed by the seed, the split and the index alone.

    Example:
        >>> int(generator(0, "train", 7).integers(100))
        48
    """
    key = [seed, *split.encode(), *index]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
