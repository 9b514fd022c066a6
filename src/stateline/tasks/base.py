"""Tasks: sources of training batches and evaluation problems that score a model's answers."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stateline.data import Tokenizer
from stateline.errors import InputError
from stateline.layers.state import shown
from stateline.models.config import ModelConfig
from stateline.models.likelihood import IGNORE as IGNORE
from stateline.models.likelihood import token_losses
from stateline.models.presets import configure
from stateline.settings import Checked, Count, Size, at_least

TrainKeywords = Mapping[str, float | str]

Inputs = Int[Tensor, "batch length"] | Float[Tensor, "batch length channels"]
"""Tokens, or numbers."""

Targets = Int[Tensor, "batch length"] | Float[Tensor, "batch length values"]
"""Tokens or labels, or numbers."""


def cross_entropy(
    outputs: Float[Tensor, "batch length classes"], targets: Int[Tensor, "batch length"]
) -> Float[Tensor, ""]:
    """Cross entropy in nats, summed over the targets other than ``IGNORE``, in float32 or better.

    Raises:
        InputError: If a target on the CPU is not a class.
    """
    try:
        return token_losses(outputs, targets.long()).sum()
    except IndexError as error:
        raise InputError(
            f"targets must be from 0 to {outputs.shape[-1] - 1}, or {IGNORE} (IGNORE) where there "
            f"is none: {error}"
        ) from error


class Batch(NamedTuple):
    """Inputs, and a target for each position.

    Attributes:
        tokens: Tokens, or numbers.
        targets: The next token or the label, ``IGNORE`` where there is none; or numbers, NaN where
            there are none.
    """

    tokens: Inputs
    targets: Targets


class ConsecutiveBatch(NamedTuple):
    """A batch whose rows continue the previous batch, except for the fresh rows."""

    tokens: Int[Tensor, "batch length"]
    targets: Int[Tensor, "batch length"]
    fresh: Bool[Tensor, " batch"]


class PackedBatch(NamedTuple):
    """A batch whose rows hold several documents.

    Attributes:
        tokens: Tokens.
        targets: The next token of the document, ``IGNORE`` where there is none.
        starts: True where a document begins. If a batch continues the previous batch, each row
            continues its last document, unless ``starts`` is true at position 0.
    """

    tokens: Int[Tensor, "batch length"]
    targets: Int[Tensor, "batch length"]
    starts: Bool[Tensor, "batch length"]


class Problems(NamedTuple):
    """Prompts of one length, and the answers that greedy decoding should give."""

    prompts: Int[Tensor, "batch prompt"]
    answers: Int[Tensor, "batch answer"]

    def check(self, task: "Task") -> None:
        """Check the shapes of a task's problems; scores would compare unequal shapes silently."""
        fit = all(isinstance(own, Tensor) and own.ndim == 2 for own in self)
        if not fit or len(self.prompts) != len(self.answers):
            raise InputError(
                f"problems of {type(task).__name__} must be prompts, a tensor of shape (batch, "
                "prompt), and answers of shape (batch, answer), got "
                f"{shown(self.prompts)} and {shown(self.answers)}"
            )


def check_batch(task: "Task", tokens: Any, targets: Any) -> None:
    """Check that a batch of a task has a target for each position."""
    pair = isinstance(tokens, Tensor) and isinstance(targets, Tensor)
    if not pair or tokens.ndim < 2 or targets.shape[:2] != tokens.shape[:2]:
        raise InputError(
            f"batches of {type(task).__name__} must be a tensor of inputs (batch, length) and one "
            f"of targets with the same two axes, got {shown(tokens)} and {shown(targets)}"
        )


def train_settings(of: "type[Task] | None" = None, **settings: float | str) -> TrainKeywords:
    """Training settings of a kind of task; ``of`` gives the settings that are left out."""
    return {**(of.training if of else {}), **settings}


class Task(metaclass=Checked):
    """Something a model can be trained on and scored at.

    Batches are functions of the task's seed and an index. So the same seed gives the same batches
    on every machine, in any order, and a resumed run continues with the same batches.

    Attributes:
        title: A few words, for tables.
        about: What a good or bad score shows and does not show, in one or two sentences.
        metric: Name of the score that tables show.
        higher_is_better: Whether a larger score is better.
        scores_share: Whether the metric is the share of answers or labels that are right, so that
            guesses have a score, and the number of problems tells the error of the score.
        solved_at: Score at the training length from which the task counts as solved; then scores at
            other lengths measure generalisation. ``None`` if the task is never solved.
        training: Keywords of the training configuration that suit the task.
        drawn: Whether the problems that are scored are drawn from the seed, so that there are
            always new ones.
        decodes: Whether the score comes from decoding answers to problems.
        carries_state: Whether ``consecutive_batch`` gives batches that continue one another, so
            that training can carry the state.
        forecasts: Whether targets are later inputs, so that only causal models may be trained.
        has_text: Whether the task has a tokenizer and held-out text.
        batch_size: Rows in a training batch.
        problems_per_batch: Rows of a batch of drawn problems.
        least_row: Random numbers that even the shortest row needs.
        vocab_size: Number of tokens.
        train_length: Training length, in the unit of ``eval_lengths``.
        eval_lengths: Lengths to score at, the training length first.
    """

    title: ClassVar[str] = ""
    about: ClassVar[str] = ""
    metric: str
    higher_is_better: bool = True
    scores_share: bool = False
    solved_at: ClassVar[float | None] = None
    training: ClassVar[TrainKeywords] = {}
    drawn: ClassVar[bool] = False
    decodes: ClassVar[bool] = False
    carries_state: ClassVar[bool] = False
    has_text: ClassVar[bool] = False
    forecasts: bool = False
    batch_size: int
    problems_per_batch: ClassVar[int] = 1
    least_row: int = 0
    vocab_size: int
    train_length: int
    eval_lengths: tuple[int, ...]

    @abstractmethod
    def train_batch(self, index: int) -> Batch | PackedBatch:
        """Training batch number ``index``."""

    def consecutive_batch(self, index: int) -> ConsecutiveBatch | PackedBatch:  # noqa: ARG002
        """Training batch number ``index``; its rows continue the previous batch.

        Raises:
            InputError: If the task has no such batches (``carries_state`` is false).
        """
        raise InputError(f"the batches of a {type(self).__name__} do not continue each other")

    def model_config(self, pattern: str, settings: Mapping[str, Any]) -> ModelConfig:
        """Configuration of a model for the task: by default a language model of its tokens.

        Args:
            pattern: The layers.
            settings: Further settings of the configuration. ``pooling`` is for classifiers and
                regressors; ``None`` means their default.

        Raises:
            InputError: If a setting cannot be used.
        """
        given = {name: value for name, value in settings.items() if name != "pooling"}
        if settings.get("pooling") is not None:
            raise InputError("pooling is for tasks with one target per sequence: leave it out")
        return configure(pattern, vocab_size=self.vocab_size, **given)

    def right_answers(self, length: int, index: int) -> Batch:  # noqa: ARG002
        """Evaluation batch number ``index`` as rows whose targets are the right answers.

        Raises:
            InputError: If the task does not ask for tokens that are right or wrong.
        """
        raise InputError(f"{type(self).__name__} has no right answers: take a task such as copying")

    def describe(self) -> Mapping[str, object]:
        """Facts about the task's data for the report; none for generated tasks."""
        return {}

    def asked(self, targets: Targets) -> Bool[Tensor, "..."]:
        """Which targets count in the loss."""
        return targets != IGNORE

    def row_lengths(self, targets: Targets) -> Int[Tensor, " batch"]:
        """Length of each row, for models that are not causal: it ends at its last target."""
        asked = self.asked(targets).flatten(2).any(2) if targets.ndim > 2 else self.asked(targets)
        places = torch.arange(1, asked.shape[1] + 1, device=asked.device)
        return (places * asked).amax(1).clamp(min=1)

    def loss(self, outputs: Float[Tensor, "batch length outputs"], targets: Targets) -> Tensor:
        """Training loss summed over the targets that count: by default cross entropy in nats."""
        return cross_entropy(outputs, targets)

    def positions(self, length: int) -> int:
        """Positions that a model reads when it is scored at ``length``."""
        return length

    def problems_scored(self, batches: int) -> int:  # noqa: ARG002
        """Number of problems in ``batches`` evaluation batches; 0 if that is not known."""
        return 0

    @property
    def copied_letters(self) -> int:
        """Size of the alphabet if the score is the share of random strings that are copied.

        The strings of a score have one length; 0 for all other scores.
        """
        return 0

    def chance(self, batches: int = 8) -> float:
        """Share of right answers of a guess: by default, always the most frequent answer.

        The answer is chosen on one half of the answers and scored on the other, then the halves
        are swapped. On the half where it is chosen, part of its frequency is luck.
        """
        answers = self._answers(batches)
        if len(answers) < 2:  # such as rows without a label
            return 0.0
        first, second = answers.tensor_split(2)
        right = 0
        for own, other in ((first, second), (second, first)):
            kinds, counts = other.unique(dim=0, return_counts=True)
            right += int((own == kinds[counts.argmax()]).all(dim=1).sum())
        return right / len(answers)

    def _answers(self, batches: int) -> Tensor:
        """The answers of ``batches`` batches, one per row: by default the targets of training."""
        targets = [self.train_batch(index).targets for index in range(batches)]
        return torch.cat([own[self.asked(own)].flatten() for own in targets])[:, None]

    def score_names(self) -> set[str]:
        """Names of all scores; none if they are not known before a model is scored."""
        return set()

    def check(self) -> None:  # most tasks need none
        """Check before training that the task can be scored at all its lengths.

        Raises:
            InputError: If it cannot.
        """

    def hold_out_validation(self) -> str:
        """Make this task score data that final scores do not use; called before the first batch.

        To choose settings, the task is constructed a second time, from another seed. Drawn tasks
        need nothing more. Tasks on files hold out a part of their training data, and score it.

        Returns:
            What is scored, in words.

        Raises:
            InputError: If there are too few data, or the task does not say what to hold out.
        """
        if self.drawn:
            return "problems drawn from another seed"
        raise InputError(
            f"settings cannot be chosen on a {type(self).__name__}, which has no "
            "hold_out_validation: add it, or use the protocol quick"
        )

    def baselines(self) -> Mapping[str, float]:
        """The metric for programs that need no training, on the same data."""
        return {}


class GeneratedTask(Task):
    """A task whose problems are drawn at random and answered by greedy decoding.

    Attributes:
        teacher_forcing: Whether each token of an answer is predicted from the true tokens before
            it, in one pass, instead of from the decoded ones. Errors then do not propagate.
    """

    scores_share = True
    drawn = decodes = True
    problems_per_batch: ClassVar[int] = 64
    teacher_forcing: bool = False

    @abstractmethod
    def problems(self, length: int, index: int) -> Problems:
        """Evaluation batch number ``index`` at ``length``; never one of the training batches."""

    def right_answers(self, length: int, index: int) -> Batch:
        """Problems with their answers, of which only the answers are targets."""
        prompts, answers = self.problems(length, index)
        tokens = torch.cat([prompts, answers[:, :-1].clamp(min=0)], dim=1)
        ignored = torch.full_like(prompts[:, 1:], IGNORE)
        return Batch(tokens, torch.cat([ignored, answers], dim=1))

    def problems_scored(self, batches: int) -> int:
        """Number of problems in ``batches`` evaluation batches."""
        _, answers = self.problems(self.train_length, 0)
        return batches * len(answers)

    def _answers(self, batches: int) -> Tensor:
        drawn = (self.problems(self.train_length, n) for n in range(batches))
        found = [answers for _, answers in drawn]
        widest = max(own.shape[1] for own in found)  # batches may differ in the length of answers
        return torch.cat([F.pad(own, (0, widest - own.shape[1]), value=IGNORE) for own in found])

    def score_names(self) -> set[str]:
        """Names of the scores of right answers."""
        _, answers = self.problems(self.train_length, 0)
        return {*self.score(answers, answers)}

    def positions(self, length: int) -> int:
        """Tokens of a prompt and its answer, without the last."""
        prompts, answers = self.problems(length, 0)
        return prompts.shape[1] + answers.shape[1] - 1

    def check(self) -> None:
        """Check that there are problems at every length."""
        for length in self.eval_lengths:
            Problems(*self.problems(length, 0)).check(self)

    def score(
        self, answers: Int[Tensor, "batch answer"], predictions: Int[Tensor, "batch answer"]
    ) -> dict[str, float]:
        """Scores of one batch of decoded answers, each the mean over the batch."""
        right = answers == predictions
        return {"accuracy": right.all(dim=1).float().mean().item()}


@dataclass(eq=False, kw_only=True)
class ExampleTask(GeneratedTask):
    """A task of short examples, each with a target at every position.

    Most targets are random, as in the official code, so the loss stays far above zero.

    Args:
        seed: Fixes every batch.
        length: Tokens of a training example before its query.
        batch_size: Examples in a training batch.
        examples: Number of training examples, reshuffled for every epoch; by default new ones are
            drawn for every batch.
        drop_last: Whether each epoch leaves out the examples that do not fill a batch. Official
            code also trains on them, in a smaller batch.

    Raises:
        InputError: If a setting is out of range, or the examples do not fill a batch.

    Attributes:
        answer_len: Tokens of the answer, the end of an example.
    """

    metric = "accuracy"
    training = train_settings(
        steps=3000, lr=1e-3, schedule="constant", eval_every=100, stop_at=0.99
    )
    problems_per_batch: ClassVar[int] = 128
    answer_len = 1
    seed: Size = field(default=0, kw_only=False)
    length: Count = 32
    batch_size: Count = 64
    examples: Count | None = None
    drop_last: bool = True

    def __post_init__(self) -> None:
        if self.examples is not None and self.examples < self.batch_size:
            raise InputError(
                f"examples must be at least batch_size={self.batch_size}, or none to draw new ones "
                f"for every batch, got examples={self.examples}"
            )
        self.train_length = self.length
        self.eval_lengths = (self.length, 2 * self.length, 4 * self.length)

    @abstractmethod
    def draw(self, rng: np.random.Generator, count: int, length: int) -> Int[Tensor, "count total"]:
        """Draw ``count`` examples with ``length`` tokens before the query."""

    def problems(self, length: int, index: int) -> Problems:
        """Evaluation batch number ``index``: examples up to their answers, and the answers."""
        examples = self.draw(
            generator(self.seed, "eval", length, index), self.problems_per_batch, length
        )
        start = examples.shape[1] - self.answer_len
        return Problems(prompts=examples[:, :start], answers=examples[:, start:])

    def train_batch(self, index: int) -> Batch:
        """Training batch number ``index``."""
        if self.examples is None:
            rng = generator(self.seed, "train", index)
            drawn = self.draw(rng, self.batch_size, self.train_length)
        else:
            sizes = self.examples, self.batch_size
            drawn = self._fixed[epoch_rows(self.seed, *sizes, index, drop_last=self.drop_last)]
        return Batch(tokens=drawn[:, :-1], targets=drawn[:, 1:])

    @cached_property
    def _fixed(self) -> Int[Tensor, "count total"]:
        assert self.examples is not None
        return self.draw(generator(self.seed, "examples"), self.examples, self.train_length)


@dataclass(eq=False, kw_only=True)
class LabelledTask(Task):
    """A task with labels at some or all positions; a label depends on the input up to its position.

    The target is not the next token. Inputs and labels share one vocabulary, inputs first. Lengths
    count tokens.

    Args:
        seed: Fixes every batch.
        length: Tokens in a training row.
        batch_size: Rows in a training batch.

    Raises:
        InputError: If a setting is out of range, here and in the methods of all subclasses.

    Attributes:
        shortest: Least length of a row.
        times: Lengths to score at, as multiples of the training length.
    """

    scores_share = True
    drawn = True
    metric = "accuracy"
    solved_at = 0.97
    training = train_settings(
        steps=3000, lr=2e-3, schedule="constant", weight_decay=0.0, eval_every=100, stop_at=0.999
    )
    problems_per_batch: ClassVar[int] = 64
    shortest: ClassVar[int] = 1
    times: ClassVar[tuple[int, ...]] = (1, 2, 4)
    seed: Size = field(default=0, kw_only=False)
    length: Count = 32
    batch_size: Count = 32

    def __post_init__(self) -> None:
        at_least(self.shortest, length=self.length)
        self.train_length = self.length
        self.eval_lengths = tuple(n * self.length for n in self.times)

    def draw(self, rng: np.random.Generator, count: int, length: int, *, training: bool) -> Batch:
        """Draw rows of ``length`` tokens, to train on or to score."""
        raise NotImplementedError(f"{type(self).__name__} must define draw")

    def train_batch(self, index: int) -> Batch:
        """Training batch number ``index``."""
        rng = generator(self.seed, "train", index)
        return self.draw(rng, self.batch_size, self.train_length, training=True)

    def labelled(self, length: int, index: int) -> Batch:
        """Evaluation batch number ``index`` of ``length`` tokens; never a training batch."""
        rng = generator(self.seed, "eval", length, index)
        return self.draw(rng, self.problems_per_batch, length, training=False)

    def right_answers(self, length: int, index: int) -> Batch:
        """The rows of :meth:`labelled`."""
        return self.labelled(length, index)

    def problems_scored(self, batches: int) -> int:
        """Number of rows in ``batches`` evaluation batches."""
        return batches * len(self.labelled(self.train_length, 0).tokens)

    def score_names(self) -> set[str]:
        """Names of the scores of right labels."""
        targets = self.labelled(self.train_length, 0).targets
        return {*self.score(targets, targets)}

    def score(
        self, targets: Int[Tensor, "batch length"], predictions: Int[Tensor, "batch length"]
    ) -> dict[str, float]:
        """Share of correct labels, over all positions and over the last quarter of positions.

        The latter is left out if the last quarter has no labels.
        """
        right, asked = (targets == predictions).float(), targets != IGNORE
        late = slice(3 * targets.shape[1] // 4, None)
        scores = {"accuracy": right[asked].mean().item()}
        if asked[:, late].any():
            scores["last_quarter_accuracy"] = right[:, late][asked[:, late]].mean().item()
        return scores


class CorpusTask(Task):
    """A task on a given text, scored by the loss on its held-out part.

    Attributes:
        tokenizer: Converts text to tokens and back.
        bytes_per_token: Bytes per token of the held-out text. Bits per byte are bits per token
            divided by this.
    """

    has_text = carries_state = True
    tokenizer: Tokenizer
    bytes_per_token: float = 1.0

    @property
    def unit(self) -> float:
        """Nats per token in one unit of the metric; by default, the metric is bits per byte."""
        return math.log(2) * self.bytes_per_token

    def score_names(self) -> set[str]:
        """The metric, and the perplexity per token."""
        return {self.metric, "perplexity"}

    @abstractmethod
    def held_out(self, length: int) -> Iterator[Batch | PackedBatch]:
        """The whole held-out text once, in windows of ``length`` tokens."""

    def beginning(self, length: int) -> Int[Tensor, "1 length"]:
        """The prompt for a sample of the model's text: at most ``length`` tokens."""
        return next(iter(self.held_out(length))).tokens[:1]


def epoch_rows(
    seed: Size, count: int, batch_size: int, index: int, *, drop_last: bool = True
) -> Int[np.ndarray, " batch"]:
    """Indices of the rows in a batch; each epoch has its own order.

    The incomplete batch at the end of an epoch is left out with ``drop_last``, and is smaller
    without it.

    Example:
        >>> [len(epoch_rows(0, 10, 4, index, drop_last=False)) for index in range(4)]
        [4, 4, 2, 4]
    """
    epoch, place = divmod(index, count // batch_size if drop_last else -(-count // batch_size))
    return _order(seed, count, epoch)[place * batch_size :][:batch_size].copy()


@lru_cache(maxsize=1)  # an order of a million rows takes 0.05 s, each time
def _order(seed: int, count: int, epoch: int) -> Int[np.ndarray, " count"]:
    """The order of the rows in an epoch."""
    return generator(seed, "train", epoch).permutation(count)


def generator(seed: int, split: str, *index: int) -> np.random.Generator:
    """Random generator that depends only on the seed, the split and the index.

    Raises:
        InputError: If a number is negative.

    Example:
        >>> int(generator(0, "train", 7).integers(100))
        48
    """
    if min(seed, *index, 0) < 0:
        raise InputError(
            "seeds, and the lengths and numbers of batches, must be at least 0, got "
            f"{min(seed, *index)}"
        )
    key = [seed, *split.encode(), *index]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
