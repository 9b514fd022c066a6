"""Scoring a trained model: by length, and by position in a sequence."""

from stateline.evaluate import evaluate, evaluate_by_position
from stateline.generate.session import OutputIsNaN
from stateline.models.factory import AnyModel
from stateline.runs.record import Scores
from stateline.tasks import Task

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


def score_by_position(model: AnyModel, task: Task) -> dict[int, float | None]:
    """The score by position at the longest length; empty if the task has no such score."""
    batches = 0 if task.has_text else EVAL_BATCHES
    return {**evaluate_by_position(model, task, task.eval_lengths[-1], batches=batches)}
