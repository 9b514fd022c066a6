"""Scores of a model on a task."""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int
from torch import Tensor

from stateline.evaluate.losses import Buckets, token_losses
from stateline.generate import generate
from stateline.models.language_model import LanguageModel
from stateline.models.make import AnyModel
from stateline.tasks.base import IGNORE, CorpusTask, GeneratedTask, LabelledTask, Task
from stateline.tasks.classification import ClassificationTask

Tokens = Int[Tensor, "batch _"]


def evaluate(model: AnyModel, task: Task, length: int, *, batches: int = 4) -> dict[str, float]:
    """Score a model at one length.

    Generated tasks: the mean over ``batches`` batches of problems, answered by greedy decoding on
    the model's state, or in one pass where the task has ``teacher_forcing``. Labelled tasks: over
    all labels of ``batches`` batches of rows, each row read from an empty state. Classification:
    the share of held-out rows, all of them, whose class is right. Corpora: bits per byte over the
    held-out text, in windows of ``length``, each from an empty state; ``batches`` limits how many
    batches of windows are read, 0 reads all.

    Args:
        model: The model; it is in evaluation mode afterwards as it was before.
        task: The task.
        length: In the task's own unit.
        batches: See above.

    Returns:
        Scores by name; the task's ``metric`` is among them.
    """
    with _evaluating(model):
        if isinstance(task, ClassificationTask):
            return {task.metric: _classified(model, task)}
        assert isinstance(model, LanguageModel)
        if isinstance(task, GeneratedTask):
            return _answered(model, task, length, batches)
        if isinstance(task, LabelledTask):
            return task.score(*_label(model, task, length, batches))
        assert isinstance(task, CorpusTask)
        buckets = _read(model, task, Buckets(length, length), batches)
        return {task.metric: buckets.mean / _nats_per_bit_per_byte(task)}


def loss_by_position(
    model: LanguageModel, task: CorpusTask, length: int, *, batches: int = 0
) -> dict[int, float]:
    """How the score depends on the position in a window: whether what came before is of use.

    Args:
        model: The model; it is in evaluation mode afterwards as it was before.
        task: A corpus.
        length: Of the windows, in tokens; each is read from an empty state.
        batches: How many batches of windows are read; 0 reads all.

    Returns:
        Bits per byte by end of bucket: positions up to an eighth of the training length, from
        there to twice as far, and so on to ``length``.
    """
    with _evaluating(model):
        buckets = _read(model, task, Buckets(max(1, task.train_length // 8), length), batches)
    unit = _nats_per_bit_per_byte(task)
    return {end: mean / unit for end, mean in buckets.means().items()}


def accuracy_by_position(
    model: LanguageModel, task: LabelledTask, length: int, *, batches: int = 4
) -> dict[int, float]:
    """How many labels are right, by how far from the beginning they stand.

    Args:
        model: The model; it is in evaluation mode afterwards as it was before.
        task: A task that asks for labels.
        length: Of the rows, in tokens; each is read from an empty state.
        batches: How many batches of rows are read.

    Returns:
        Share of labels that are right by end of bucket, buckets as for :func:`loss_by_position`.
        Buckets in which nothing is asked for are left out.
    """
    with _evaluating(model):
        targets, predictions = _label(model, task, length, batches)
    buckets, asked = Buckets(max(1, task.train_length // 8), length), targets != IGNORE
    positions = torch.arange(1, length + 1).expand_as(targets)
    buckets.add(positions[asked], (targets == predictions)[asked].float())
    return buckets.means()


@contextmanager
def _evaluating(model: AnyModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _answered(
    model: LanguageModel, task: GeneratedTask, length: int, batches: int
) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for index in range(batches):
        prompts, answers = task.problems(length, index)
        answer = _guided if task.teacher_forcing else _decoded
        predictions = answer(model, prompts, answers)
        for name, score in task.score(answers, predictions.cpu()).items():
            totals[name] += score / batches
    return dict(totals)


@torch.inference_mode()
def _classified(model: AnyModel, task: ClassificationTask) -> float:
    """Share of the held-out rows whose likeliest class at their last position is right."""
    right = count = 0
    device = next(model.parameters()).device
    for x, targets in task.held_out():
        predictions, asked = model(x.to(device)).argmax(dim=2).cpu(), targets != IGNORE
        right += int((predictions == targets)[asked].sum())
        count += int(asked.sum())
    return right / count


def _decoded(model: LanguageModel, prompts: Tokens, answers: Tokens) -> Tokens:
    """Each token after those decoded before."""
    return generate(model, prompts.to(model.embedding.weight.device), answers.shape[1])


@torch.inference_mode()
def _guided(model: LanguageModel, prompts: Tokens, answers: Tokens) -> Tokens:
    """Each token after the true ones before."""
    known = answers[:, :-1].clamp(min=0)  # behind the end of a short answer anything may stand
    tokens = torch.cat([prompts, known], dim=1).to(model.embedding.weight.device)
    return model(tokens)[:, prompts.shape[1] - 1 :].argmax(dim=2)


@torch.inference_mode()
def _label(
    model: LanguageModel, task: LabelledTask, length: int, batches: int
) -> tuple[Int[Tensor, "rows length"], Int[Tensor, "rows length"]]:
    """Targets of so many batches, and for each the likeliest token."""
    rows = [task.labelled(length, index) for index in range(batches)]
    device = model.embedding.weight.device
    predictions = [model(tokens.to(device)).argmax(dim=2).cpu() for tokens, _ in rows]
    return torch.cat([targets for _, targets in rows]), torch.cat(predictions)


@torch.inference_mode()
def _read(model: LanguageModel, task: CorpusTask, buckets: Buckets, batches: int) -> Buckets:
    """The losses on the held-out text, in windows as long as the buckets reach."""
    assert buckets.last is not None
    for index, (tokens, targets) in enumerate(task.held_out(buckets.last)):
        if batches and index == batches:
            break
        logits = model(tokens.to(model.embedding.weight.device))
        losses, scored = token_losses(logits, targets.to(logits.device)).cpu(), targets != IGNORE
        positions = torch.arange(1, targets.shape[1] + 1).expand_as(targets)
        buckets.add(positions[scored], losses[scored])
    return buckets


def _nats_per_bit_per_byte(task: CorpusTask) -> float:
    return math.log(2) * task.bytes_per_token
