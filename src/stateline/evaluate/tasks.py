"""Scores of a model on a task."""

import copy
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import singledispatch
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from stateline.errors import InputError
from stateline.evaluate.losses import Buckets, token_losses
from stateline.generate import generate
from stateline.layers.base import row_inputs
from stateline.layers.state import replace_rows
from stateline.models.factory import AnyModel
from stateline.models.language_model import LanguageModel
from stateline.models.sequence_head import SequenceHead
from stateline.tasks.base import IGNORE, CorpusTask, GeneratedTask, LabelledTask, Task
from stateline.tasks.rows import RowsTask
from stateline.tasks.text.corpus import TextTask

Tokens = Int[Tensor, "batch _"]


FIRST_WHILE_TRAINING = 1 << 20
"""Number of the first batch of drawn problems that scores a model while it is trained."""


def evaluate(
    model: AnyModel, task: Task, length: int, *, batches: int = 4, training: bool = False
) -> dict[str, float]:
    """Score a model at one length.

    - Generated tasks: the mean over ``batches`` batches of problems, answered by greedy decoding on
      the model's state, or in one pass if the task has ``teacher_forcing``.
    - Labelled tasks: over all labels of ``batches`` batches of rows, each read from an empty state.
    - Rows of a data set: over all targets of all held-out rows.
    - Corpora: bits per byte and perplexity per token of the held-out text, in windows of
      ``length``, each read from an empty state, or with carried state if the task is ``carried``;
      ``batches`` limits how many batches of windows are read, 0 reads all.
    - Other kinds of tasks: what the function registered with :func:`score_task` does.

    Args:
        model: The model; afterwards it is in training or evaluation mode as before.
        task: The task.
        length: In the task's own unit.
        batches: See above.
        training: The model is being trained: score it on other problems than afterwards, where
            they are drawn. So neither when it stops nor what is chosen depends on those that give
            the final score.

    Returns:
        Scores by name; the task's ``metric`` is among them.

    Raises:
        InputError: If nothing is registered for the kind of task.
    """
    with _evaluating(model):
        return score_task(_later(task) if training else task, model, length, batches)


def _later(task: Task) -> Task:
    """The task with other problems, where these are drawn."""
    drawn = {GeneratedTask: "problems", LabelledTask: "labelled"}
    name = next((name for kind, name in drawn.items() if isinstance(task, kind)), None)
    if name is None:
        return task
    draw, later = getattr(task, name), copy.copy(task)
    setattr(later, name, lambda length, index: draw(length, FIRST_WHILE_TRAINING + index))
    return later


@singledispatch
def score_task(task: Task, model: Any, length: int, batches: int) -> dict[str, float]:  # noqa: ARG001
    """Score a model in evaluation mode on a kind of task; see :func:`evaluate`.

    For a kind of task of your own, register a function with the same arguments::

        @score_task.register
        def _(task: MyTask, model, length, batches):
            return {task.metric: ...}

    Raises:
        InputError: If nothing is registered for the kind of task.
    """
    raise InputError(
        f"no way to score a {type(task).__name__} is known: derive it from GeneratedTask, "
        "LabelledTask, CorpusTask or RowsTask, or register a function with "
        "stateline.evaluate.score_task.register"
    )


@score_task.register
def _answered(
    task: GeneratedTask, model: LanguageModel, length: int, batches: int
) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for index in range(batches):
        prompts, answers = task.problems(length, index)
        answer = _guided if task.teacher_forcing else _decoded
        predictions = answer(model, prompts, answers)
        for name, score in task.score(answers, predictions.cpu()).items():
            totals[name] += score / batches
    return dict(totals)


@score_task.register
def _labelled(
    task: LabelledTask, model: LanguageModel, length: int, batches: int
) -> dict[str, float]:
    return task.score(*_label(model, task, length, batches))


@score_task.register
def _corpus(task: CorpusTask, model: LanguageModel, length: int, batches: int) -> dict[str, float]:
    return _text_scores(task, _read(model, task, Buckets(length, length), batches))


@score_task.register
def _text(task: TextTask, model: LanguageModel, length: int, batches: int) -> dict[str, float]:
    read = _read_on if task.carried else _read
    return _text_scores(task, read(model, task, Buckets(length, length), batches))


def _text_scores(task: CorpusTask, buckets: Buckets) -> dict[str, float]:
    perplexity = float(torch.tensor(buckets.mean, dtype=torch.float64).exp())
    return {task.metric: buckets.mean / _nats_per_bit_per_byte(task), "perplexity": perplexity}


@score_task.register
@torch.inference_mode()
def _rows(task: RowsTask, model: SequenceHead, length: int, batches: int) -> dict[str, float]:  # noqa: ARG001
    device = model.head.weight.device
    tallies = []
    for x, targets in task.held_out():
        outputs = model(*row_inputs(model, x.to(device), task.row_lengths(targets))).cpu()
        tallies.append(task.objective.tally(outputs, targets))
    return task.objective.score(task.objective.total(tallies))


def loss_by_position(
    model: LanguageModel, task: CorpusTask, length: int, *, batches: int = 0
) -> dict[int, float]:
    """Loss by position in a window, which shows whether a model uses long contexts.

    Args:
        model: The model; afterwards it is in training or evaluation mode as before.
        task: A corpus.
        length: Tokens in a window; each window is read from an empty state.
        batches: How many batches of windows are read; 0 reads all.

    Returns:
        Bits per byte by the end of each bucket of positions. The first bucket ends at an eighth of
        the training length, each of the others at twice the end of the previous one, the last at
        ``length``.
    """
    with _evaluating(model):
        buckets = _read(model, task, Buckets(max(1, task.train_length // 8), length), batches)
    unit = _nats_per_bit_per_byte(task)
    return {end: mean / unit for end, mean in buckets.means().items()}


def accuracy_by_position(
    model: LanguageModel, task: LabelledTask, length: int, *, batches: int = 4
) -> dict[int, float]:
    """Accuracy by position in a row.

    Args:
        model: The model; afterwards it is in training or evaluation mode as before.
        task: A labelled task.
        length: Tokens in a row; each row is read from an empty state.
        batches: How many batches of rows are read.

    Returns:
        Share of correct labels by the end of each bucket of positions; buckets are those of
        :func:`loss_by_position`. Buckets without labels are left out.
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


def _decoded(model: LanguageModel, prompts: Tokens, answers: Tokens) -> Tokens:
    """Predict each token from the decoded ones before it."""
    return generate(model, prompts.to(model.embedding.weight.device), answers.shape[1])


@torch.inference_mode()
def _guided(model: LanguageModel, prompts: Tokens, answers: Tokens) -> Tokens:
    """Predict each token from the true ones before it."""
    known = answers[:, :-1].clamp(min=0)  # any token may follow a short answer
    tokens = torch.cat([prompts, known], dim=1).to(model.embedding.weight.device)
    return model(tokens)[:, prompts.shape[1] - 1 :].argmax(dim=2)


@torch.inference_mode()
def _label(
    model: LanguageModel, task: LabelledTask, length: int, batches: int
) -> tuple[Int[Tensor, "rows length"], Int[Tensor, "rows length"]]:
    """Targets of the batches, and the most likely token for each."""
    rows = [task.labelled(length, index) for index in range(batches)]
    device = model.embedding.weight.device
    predictions = [model(tokens.to(device)).argmax(dim=2).cpu() for tokens, _ in rows]
    return torch.cat([targets for _, targets in rows]), torch.cat(predictions)


@torch.inference_mode()
def _read(model: LanguageModel, task: CorpusTask, buckets: Buckets, batches: int) -> Buckets:
    """Losses on the held-out text, in windows of the length that the buckets cover."""
    assert buckets.last is not None
    for index, (tokens, targets) in enumerate(task.held_out(buckets.last)):
        if batches and index == batches:
            break
        _add(buckets, model(tokens.to(model.embedding.weight.device)), targets)
    return buckets


@torch.inference_mode()
def _read_on(model: LanguageModel, task: TextTask, buckets: Buckets, batches: int) -> Buckets:
    """Losses on the held-out text, the state carried from window to window."""
    assert buckets.last is not None
    state: Any = None
    for index, (tokens, targets, fresh) in enumerate(task.held_out_rows(buckets.last)):
        if batches and index == batches:
            break
        begun = model.init_state(len(tokens))
        state = begun if state is None else replace_rows(state, fresh, begun)
        logits, state = model.forward_chunk(tokens.to(model.embedding.weight.device), state)
        _add(buckets, logits, targets)
    return buckets


def _add(buckets: Buckets, logits: Tensor, targets: Tokens) -> None:
    losses, scored = token_losses(logits, targets.to(logits.device)).cpu(), targets != IGNORE
    positions = torch.arange(1, targets.shape[1] + 1).expand_as(targets)
    buckets.add(positions[scored], losses[scored])


def _nats_per_bit_per_byte(task: CorpusTask) -> float:
    return math.log(2) * task.bytes_per_token
