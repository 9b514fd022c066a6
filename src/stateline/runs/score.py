"""What a trained model can do: scores, bits of its state that it needs, text that it writes."""

from collections.abc import Mapping
from typing import Any

import torch

from stateline.capacity import measure
from stateline.evaluate import evaluate, evaluate_by_position
from stateline.generate import Sampling, generate
from stateline.generate.session_state import OutputIsNaN
from stateline.models.factory import AnyModel
from stateline.models.language_model import LanguageModel
from stateline.runs.record import Scores
from stateline.runs.results import CapacityRecord
from stateline.tasks import Task

EVAL_BATCHES = 16
"""Batches of fresh problems behind each final score; a text is scored to its end instead."""

SAMPLE_PROMPT, SAMPLE_TOKENS = 64, 256
"""Tokens of held-out text that a sample begins with, and tokens that the model adds."""


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


def needed_bits(
    model: AnyModel, task: Task, by_length: Mapping[int, Scores]
) -> CapacityRecord | None:
    """How the score at the training length depends on the precision of the state.

    ``None`` for unsolved tasks, which any precision scores about the same.
    """
    if not task.decodes or not isinstance(model, LanguageModel):
        return None
    score = by_length[task.train_length][task.metric]
    if task.solved_at is not None and (score is None or score < task.solved_at):
        return None
    found = measure(model, task, task.train_length)
    return CapacityRecord(numbers=found.numbers, needed=found.needed, by_bits=found.by_bits)


def sample_text(model: AnyModel, task: Any) -> str | None:
    """The beginning of the held-out text and the model's continuation.

    ``None`` without a text, or if the model gives NaN.
    """
    if not task.has_text or not isinstance(model, LanguageModel):
        return None
    limit = model.max_len or SAMPLE_PROMPT + SAMPLE_TOKENS
    prompt = task.beginning(min(SAMPLE_PROMPT, limit))
    prompt, free = prompt.to(model.device), limit + 1 - prompt.shape[1]
    count, sampling = min(SAMPLE_TOKENS, free), Sampling(temperature=0.8)
    try:
        tokens = generate(model, prompt, count, sampling=sampling)
    except OutputIsNaN:
        return None
    ids, size = torch.cat([prompt, tokens], dim=1)[0], task.tokenizer.vocab_size
    text = task.tokenizer.decode(ids[ids < size].tolist())  # the model may have more tokens
    return text.encode(errors="surrogateescape").decode(errors="replace")
