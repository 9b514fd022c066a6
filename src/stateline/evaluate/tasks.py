"""Scores of a model on a task."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import singledispatch
from itertools import islice
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from stateline.data.tokenizer import utf8
from stateline.errors import InputError
from stateline.evaluate.division import by_rows
from stateline.evaluate.losses import Buckets, losses_of
from stateline.generate import answer, generate
from stateline.generate.session_state import check_model
from stateline.layers.base import row_inputs
from stateline.layers.documents import Documents
from stateline.layers.state import replace_rows
from stateline.models.factory import AnyModel
from stateline.models.language_model import LanguageModel
from stateline.models.sequence_head import SequenceHead
from stateline.settings import at_least, check_kind
from stateline.tasks.base import (
    IGNORE,
    Batch,
    ConsecutiveBatch,
    CorpusTask,
    GeneratedTask,
    LabelledTask,
    PackedBatch,
    Problems,
    Task,
    check_batch,
)
from stateline.tasks.rows import RowsTask
from stateline.tasks.text.answers import Answers
from stateline.tasks.text.corpus import TextTask
from stateline.tasks.text.mixture import Mixture

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
    - Answers: the loss per token of the held-out answers, and the share of them that greedy
      decoding gives exactly.
    - Other kinds of tasks: by the function registered with :func:`score_task`.

    Args:
        model: The model; afterwards it is in training or evaluation mode as before.
        task: The task.
        length: In the task's own unit.
        batches: See above.
        training: Whether the model is being trained. If so, drawn tasks are scored on problems that
            the final score does not use. So these do not influence the end of the training or a
            choice of settings.

    Returns:
        Scores by name; the task's ``metric`` is among them.

    Raises:
        InputError: If ``length`` or ``batches`` is below 1 (0 batches are allowed for data sets),
            nothing is registered for the kind of task, or its ``metric`` is not among the scores.
    """
    _check_size(task, length, batches)
    first = FIRST_WHILE_TRAINING if training else 0
    with _evaluating(model):
        scores = score_task(task, model, length, range(first, first + batches))
    if task.metric not in scores:
        raise InputError(
            f"the metric of {type(task).__name__} must be one of its scores, "
            f"{', '.join(sorted(scores))}, got {task.metric!r}"
        )
    return {name: float(score) for name, score in scores.items()}


@singledispatch
def score_task(task: Task, model: Any, length: int, batches: range) -> dict[str, float]:  # noqa: ARG001
    """Score a model in evaluation mode on a kind of task; see :func:`evaluate`.

    For a kind of task of your own, register a function. Problems that are drawn must be a function
    of their number in ``batches``: training and the final score use different numbers. A task
    with a fixed set of problems may ignore the numbers, or take their count as a limit::

        @score_task.register
        def _(task: MyTask, model, length, batches):
            drawn = [task.problems(length, index) for index in batches]
            return {task.metric: ...}

    Args:
        task: The task.
        model: The model.
        length: In the task's own unit.
        batches: Numbers of the evaluation batches; an empty range means all batches.

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
    task: GeneratedTask, model: LanguageModel, length: int, batches: range
) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for index in batches:
        prompts, answers = problems = Problems(*task.problems(length, index))
        problems.check(task)
        answer = _teacher_forced if task.teacher_forcing else _decoded
        predictions = answer(model, prompts, answers)
        for name, score in task.score(answers, predictions).items():
            totals[name] += score / len(batches)
    return dict(totals)


@score_task.register
def _labelled(
    task: LabelledTask, model: LanguageModel, length: int, batches: range
) -> dict[str, float]:
    return task.score(*_label(model, task, length, batches))


@score_task.register
def _corpus(
    task: CorpusTask, model: LanguageModel, length: int, batches: range
) -> dict[str, float]:
    return _text_scores(task, _read(model, task, Buckets(length, length), batches))


@score_task.register
def _text(task: TextTask, model: LanguageModel, length: int, batches: range) -> dict[str, float]:
    read = _carried if task.carried else _read
    return _text_scores(task, read(model, task, Buckets(length, length), batches))


@score_task.register
def _mixture(task: Mixture, model: LanguageModel, length: int, batches: range) -> dict[str, float]:
    each = [score_task(part, model, length, batches)[task.metric] for part in task.parts]
    names = map(task.score_name, task.names)
    return {task.metric: task.mean(each), **dict(zip(names, each, strict=True))}


def _text_scores(task: CorpusTask, buckets: Buckets) -> dict[str, float]:
    perplexity = float(torch.tensor(buckets.mean, dtype=torch.float64, device="cpu").exp())
    return {task.metric: buckets.mean / task.unit, "perplexity": perplexity}


@score_task.register
def _answers(task: Answers, model: LanguageModel, length: int, batches: range) -> dict[str, float]:
    scores, examples = _text(task, model, length, batches), task.questions()

    def right(rows: Tensor) -> Tensor:
        asked = [examples[row] for row in rows.tolist()]
        wanted = [own.tokens[own.answer :] for own in asked]
        prompts = [own.tokens[: own.answer].tolist() for own in asked]
        written = answer(model, task.tokenizer, prompts, [len(own) for own in wanted])
        texts = (utf8(task.tokenizer.decode(own)).decode(errors="replace") for own in wanted)
        return torch.tensor([a == b for a, b in zip(written, texts, strict=True)], device="cpu")

    if examples:
        found = by_rows(right, torch.arange(len(examples), device="cpu"), may_stop=True)
        scores["exact_match"] = found.float().mean().item()
    return scores


@score_task.register
@torch.inference_mode()
def _rows(task: RowsTask, model: SequenceHead, length: int, batches: range) -> dict[str, float]:  # noqa: ARG001
    device = model.head.weight.device

    def outputs(x: Tensor, targets: Tensor) -> Tensor:
        return model(*row_inputs(model, x.to(device), task.row_lengths(targets)))

    tallies = [
        task.objective.tally(by_rows(outputs, x, targets), targets)
        for x, targets in task.scored_batches()
    ]
    return task.objective.score(task.objective.total(tallies))


def evaluate_by_position(
    model: AnyModel, task: Task, length: int, *, batches: int = 4
) -> dict[int, float]:
    """Score by position: it shows whether a model uses long contexts.

    Args:
        model: The model; afterwards it is in training or evaluation mode as before.
        task: The task.
        length: Tokens in a row; each row is read from an empty state.
        batches: How many batches of rows are read; of a corpus, 0 reads all.

    Returns:
        A score for each bucket of positions, by its last position: bits per byte on a corpus, the
        share of correct labels on a labelled task. Nothing for other kinds of tasks, unless a
        function is registered with :func:`score_positions`. The first bucket ends at an eighth of
        the training length, each of the others at twice the end of the previous one, the last at
        ``length``. Buckets without targets are left out.

    Raises:
        InputError: As :func:`evaluate`.
    """
    _check_size(task, length, batches)
    with _evaluating(model):
        buckets = Buckets(max(1, task.train_length // 8), length)
        return score_positions(task, model, buckets, range(batches))


@singledispatch
def score_positions(task: Task, model: Any, buckets: Buckets, batches: range) -> dict[int, float]:  # noqa: ARG001
    """Score by position; see :func:`evaluate_by_position`, and :func:`score_task` for your own."""
    return {}


@score_positions.register
def _loss_by_position(
    task: CorpusTask, model: LanguageModel, buckets: Buckets, batches: range
) -> dict[int, float]:
    means = _read(model, task, buckets, batches).means()
    return {end: mean / task.unit for end, mean in means.items()}


@score_positions.register
def _accuracy_by_position(
    task: LabelledTask, model: LanguageModel, buckets: Buckets, batches: range
) -> dict[int, float]:
    assert buckets.last is not None
    targets, predictions = _label(model, task, buckets.last, batches)
    asked, positions = targets != IGNORE, torch.arange(buckets.last, device=targets.device)
    buckets.add(1 + positions.expand_as(targets)[asked], (targets == predictions)[asked].float())
    return buckets.means()


def _check_size(task: Task, length: int, batches: int) -> None:
    """Drawn tasks need at least one batch; for data sets, 0 means all batches."""
    check_kind("task", task, Task, "make_task('copying')")
    at_least(1, length=length)
    at_least(1 if task.drawn else 0, batches=batches)


@contextmanager
def _evaluating(model: AnyModel) -> Iterator[None]:
    check_model(model)
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _decoded(model: LanguageModel, prompts: Tokens, answers: Tokens) -> Tokens:
    """Predict each token from the decoded ones before it."""
    return by_rows(lambda rows: generate(model, rows, answers.shape[1]), prompts, may_stop=True)


@torch.inference_mode()
def _teacher_forced(model: LanguageModel, prompts: Tokens, answers: Tokens) -> Tokens:
    """Predict each token from the true ones before it."""
    known = answers[:, :-1].clamp(min=0)  # any token may follow a short answer
    tokens = torch.cat([prompts, known], dim=1)
    return _likeliest(model, tokens)[:, prompts.shape[1] - 1 :]


def _likeliest(model: LanguageModel, tokens: Tokens) -> Tokens:
    """The most likely output at each position."""
    return by_rows(lambda rows: model(rows.to(model.device)).argmax(dim=2), tokens)


@torch.inference_mode()
def _label(
    model: LanguageModel, task: LabelledTask, length: int, batches: range
) -> tuple[Int[Tensor, "rows length"], Int[Tensor, "rows length"]]:
    """Targets of the batches, and the most likely token for each."""
    rows = [task.labelled(length, index) for index in batches]
    for batch in rows:
        check_batch(task, *batch)
    predictions = [_likeliest(model, tokens) for tokens, _ in rows]
    return torch.cat([targets for _, targets in rows]), torch.cat(predictions)


@torch.inference_mode()
def _read(model: LanguageModel, task: CorpusTask, buckets: Buckets, batches: range) -> Buckets:
    """Losses on the held-out text, in windows of the length that the buckets cover."""
    assert buckets.last is not None
    device = model.device

    def losses(tokens: Tensor, targets: Tensor, starts: Tensor | None = None) -> Tensor:
        reduce = losses_of(targets.to(device), model.config.vocab_size)
        return model(tokens.to(device), starts=starts, reduce=reduce)

    for batch in islice(task.held_out(buckets.last), len(batches) or None):
        _add(buckets, by_rows(losses, *batch), batch)
    return buckets


@torch.inference_mode()
def _carried(model: LanguageModel, task: TextTask, buckets: Buckets, batches: range) -> Buckets:
    """Losses on the held-out text; the state is carried from window to window."""
    assert buckets.last is not None
    device, state = model.device, None

    def losses(tokens: Tensor, targets: Tensor, fresh: Tensor) -> Tensor:
        nonlocal state
        starts, fresh = (fresh, fresh[:, 0]) if fresh.ndim > 1 else (None, fresh)
        empty = model.init_state(len(tokens))
        state = empty if state is None else replace_rows(state, fresh, empty)
        options: dict[str, Any] = {"starts": starts}
        options["reduce"] = losses_of(targets.to(device), model.config.vocab_size)
        losses, state = model.forward_chunk(tokens.to(device), state, **options)
        return losses

    for window in islice(task.held_out_rows(buckets.last), len(batches) or None):
        _add(buckets, by_rows(losses, *window), window)
    return buckets


def _add(buckets: Buckets, losses: Tensor, batch: Batch | ConsecutiveBatch | PackedBatch) -> None:
    """Add losses by the position in the row, or in the document of packed rows."""
    scored = batch.targets != IGNORE
    positions = torch.arange(scored.shape[1], device=scored.device)
    if isinstance(batch, PackedBatch):
        positions = Documents(batch.starts).positions
    buckets.add(positions.expand_as(scored)[scored] + 1, losses[scored])
