"""Scoring a trained model: by length, and by position in a sequence."""

from typing import Any

from stateline.evaluate import accuracy_by_position, evaluate, loss_by_position
from stateline.generate.session import OutputIsNaN
from stateline.models.factory import AnyModel
from stateline.models.language_model import LanguageModel
from stateline.runs.record import Scores
from stateline.tasks import GeneratedTask, LabelledTask, RowsTask, Task

EVAL_BATCHES = 16
"""Batches of fresh problems behind each final score; a text is scored to its end instead."""


def score_by_length(model: AnyModel, task: Task) -> dict[int, Scores]:
    """Scores at every length of the task; none where the model gives NaN."""
    return {length: _score(model, task, length) for length in task.eval_lengths}


def _score(model: AnyModel, task: Task, length: int) -> Scores:
    try:
        return {**evaluate(model, task, length, batches=0 if task.has_text else EVAL_BATCHES)}
    except OutputIsNaN:
        return {task.metric: None}


def score_by_position(model: AnyModel, task: Any) -> dict[int, float | None]:
    """The score by position at the longest length; empty if the task has no such score."""
    length = task.eval_lengths[-1]
    if not isinstance(model, LanguageModel):
        return {}
    if task.has_text:
        return {**loss_by_position(model, task, length)}
    if task.kind == "labelled":
        return {**accuracy_by_position(model, task, length, batches=EVAL_BATCHES)}
    return {}


def problems_scored(task: Task) -> int:
    """Answers (or rows of them) behind each score, if that is the share that is right, else 0."""
    if not task.metric.endswith("accuracy"):
        return 0
    if isinstance(task, RowsTask):
        return len(task.held_out_rows.inputs)
    if isinstance(task, GeneratedTask):
        return EVAL_BATCHES * len(task.problems(task.train_length, 0).answers)
    if isinstance(task, LabelledTask):
        return EVAL_BATCHES * len(task.labelled(task.train_length, 0).tokens)
    return 0


def diverged_scores(task: Task) -> dict[int, Scores]:
    """The scores of a model whose training diverged: none."""
    return {length: {task.metric: None} for length in task.eval_lengths}
