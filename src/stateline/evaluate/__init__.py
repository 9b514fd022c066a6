"""Scores of a model on tasks and on texts of any length."""

from stateline.evaluate.losses import Buckets
from stateline.evaluate.tasks import evaluate, evaluate_by_position, score_positions, score_task
from stateline.evaluate.text import TextScore, score_file, score_text
from stateline.models.likelihood import token_losses

__all__ = [
    "Buckets",
    "TextScore",
    "evaluate",
    "evaluate_by_position",
    "score_file",
    "score_positions",
    "score_task",
    "score_text",
    "token_losses",
]
