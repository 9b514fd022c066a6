"""The training loop."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.files import append_line, write_text
from stateline.models.language_model import LanguageModel
from stateline.tasks.base import IGNORE, Batch, Task
from stateline.train.config import TrainConfig
from stateline.train.optimizer import make_optimizer, set_learning_rate


class TrainingDiverged(InputError):
    """The loss is no longer a finite number.

    Attributes:
        steps: Updates before that.
    """

    def __init__(self, message: str, steps: int = 0) -> None:
        super().__init__(message)
        self.steps = steps


@dataclass(frozen=True)
class Metrics:
    """One line of ``metrics.jsonl``.

    Attributes:
        step: Updates so far.
        steps: Updates planned.
        loss: Mean over the updates since the last line, in nats per target.
        metric: Score at the training length, where it was measured.
        lr: Of the last update.
        tokens_per_second: Since the last line, without evaluation.
        seconds_left: To the end of the plan, at this speed.
    """

    step: int
    steps: int
    loss: float
    metric: float | None
    lr: float
    tokens_per_second: float
    seconds_left: float


@dataclass
class TrainResult:
    """What a training run came to.

    Attributes:
        stopped: ``finished`` (all steps done) or ``solved`` (``stop_at`` reached).
        steps: Updates done.
        seconds: Time spent in updates.
        tokens: Tokens trained on.
        steps_to_solve: Updates before the first score that reached the task's ``solved_at``.
        curve: All lines of metrics.
    """

    stopped: str = "finished"
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    steps_to_solve: int | None = None
    curve: list[Metrics] = field(default_factory=list)


def train(
    model: LanguageModel,
    task: Task,
    config: TrainConfig,
    *,
    log_file: Path | None = None,
    on_log: Callable[[Metrics], None] = lambda _: None,
) -> TrainResult:
    """Train a model on a task.

    Args:
        model: The model; its weights are changed.
        task: Gives the batches and the score.
        config: Optimizer, schedule, length.
        log_file: Where a line of metrics is written at every ``log_every`` steps.
        on_log: Called with the same metrics.

    Returns:
        How it went.

    Raises:
        TrainingDiverged: If the loss becomes infinite or not a number; the message names the step.
        InputError: If the log cannot be written.
    """
    optimizer = make_optimizer(model, config)
    result, losses = TrainResult(), list[float]()
    if log_file is not None:
        write_text(log_file, "")  # a folder that cannot be written to shows now
    model.train()
    started, tokens_before = time.perf_counter(), 0
    for step in range(config.steps):
        share = set_learning_rate(optimizer, config, step)
        batch = task.train_batch(step)
        losses.append(_update(model, optimizer, batch, config, step))
        result.steps, result.tokens = step + 1, result.tokens + batch.tokens.numel()

        last = result.steps == config.steps
        evaluating = last or (config.eval_every and result.steps % config.eval_every == 0)
        if not (evaluating or result.steps % config.log_every == 0):
            continue
        elapsed = time.perf_counter() - started
        result.seconds += elapsed
        score = evaluate(model, task, task.train_length)[task.metric] if evaluating else None
        metrics = Metrics(
            step=result.steps,
            steps=config.steps,
            loss=sum(losses) / len(losses),
            metric=score,
            lr=share * config.lr,
            tokens_per_second=(result.tokens - tokens_before) / elapsed,
            seconds_left=(config.steps - result.steps) * result.seconds / result.steps,
        )
        result.curve.append(metrics)
        if log_file is not None:
            append_line(log_file, json.dumps(asdict(metrics)))
        on_log(metrics)
        if _as_good(task, score, task.solved_at) and result.steps_to_solve is None:
            result.steps_to_solve = result.steps
        if _as_good(task, score, config.stop_at):
            result.stopped = "solved"
            break
        losses.clear()
        started, tokens_before = time.perf_counter(), result.tokens
    model.eval()
    return result


def _update(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: TrainConfig,
    step: int,
) -> float:
    """Make one update, and return the loss before it."""
    logits = model(batch.tokens).flatten(0, 1).float()
    loss = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORE)
    value = loss.item()
    if not math.isfinite(value):
        raise TrainingDiverged(
            f"the loss became {value} at step {step + 1}: lower lr "
            f"(now {config.lr}) or clip (now {config.clip})",
            steps=step,
        )
    optimizer.zero_grad()
    loss.backward()
    if config.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    return value


def _as_good(task: Task, score: float | None, goal: float | None) -> bool:
    """Whether there is a score, and a goal that it reaches."""
    if score is None or goal is None:
        return False
    return score >= goal if task.higher_is_better else score <= goal
