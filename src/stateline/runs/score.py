"""Scoring a trained model: by length, and by position in a sequence."""

from typing import Any

from stateline.evaluate import accuracy_by_position, evaluate, loss_by_position
from stateline.models.factory import AnyModel
from stateline.models.language_model import LanguageModel
from stateline.runs.record import Scores
from stateline.tasks import Task

EVAL_BATCHES = 16
"""Batches of fresh problems behind each final score; a text is scored to its end instead."""


def score_by_length(model: AnyModel, task: Task) -> dict[int, Scores]:
    """Scores at every length of the task."""
    batches = 0 if task.has_text else EVAL_BATCHES
    return {
        length: {**evaluate(model, task, length, batches=batches)} for length in task.eval_lengths
    }


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


def diverged_scores(task: Task) -> dict[int, Scores]:
    """The scores of a model whose training diverged: none."""
    return {length: {task.metric: None} for length in task.eval_lengths}
