"""Scores of a model on a task."""

import math
from collections import defaultdict

import torch
import torch.nn.functional as F

from stateline.generate import generate
from stateline.models.language_model import LanguageModel
from stateline.tasks.base import IGNORE, CorpusTask, GeneratedTask, Task


def evaluate(
    model: LanguageModel, task: Task, length: int, *, batches: int = 4
) -> dict[str, float]:
    """Score a model at one length.

    Generated tasks: the mean over ``batches`` batches of problems, answered by greedy decoding on
    the model's state. Corpora: bits per byte over the held-out text, in windows of ``length``,
    each from an empty state; ``batches`` limits how many batches of windows are read, 0 reads all.

    Args:
        model: The model; it is in evaluation mode afterwards as it was before.
        task: The task.
        length: In the task's own unit.
        batches: See above.

    Returns:
        Scores by name; the task's ``metric`` is among them.
    """
    was_training = model.training
    model.eval()
    try:
        if isinstance(task, GeneratedTask):
            return _answered(model, task, length, batches)
        assert isinstance(task, CorpusTask)
        return {task.metric: _bits_per_byte(model, task, length, batches)}
    finally:
        model.train(was_training)


def _answered(
    model: LanguageModel, task: GeneratedTask, length: int, batches: int
) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for index in range(batches):
        prompts, answers = task.problems(length, index)
        predictions = generate(model, prompts, answers.shape[1])
        for name, score in task.score(answers, predictions).items():
            totals[name] += score / batches
    return dict(totals)


@torch.inference_mode()
def _bits_per_byte(model: LanguageModel, task: CorpusTask, length: int, batches: int) -> float:
    bits, count = 0.0, 0
    for index, (tokens, targets) in enumerate(task.held_out(length)):
        if batches and index == batches:
            break
        logits = model(tokens).flatten(0, 1).float()
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
        bits += loss.item() / math.log(2)
        count += int((targets != IGNORE).sum())
    return bits / count / task.bytes_per_token
