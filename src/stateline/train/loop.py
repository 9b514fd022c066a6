"""The training loop."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.files import append_line, write_text
from stateline.layers.compose import recompute
from stateline.layers.state import detach, select_rows, trim
from stateline.models.make import AnyModel
from stateline.tasks.base import IGNORE, ConsecutiveTask, Task
from stateline.train import checkpoint
from stateline.train.checkpoint import Progress, Snapshot
from stateline.train.config import TrainConfig
from stateline.train.metrics import (
    METRICS,
    Metrics,
    TrainingDiverged,
    TrainResult,
    read_metrics,
)
from stateline.train.optimizer import make_optimizer, set_learning_rate
from stateline.train.processes import Processes, local_part
from stateline.train.segment import Segment

ALONE = Processes()

FREE = ("save_every", "keep", "parallel")
"""Settings that may change when a run goes on: what it learns does not depend on them."""


def train(
    model: AnyModel,
    task: Task,
    config: TrainConfig,
    *,
    folder: Path | None = None,
    run: Any = None,
    processes: Processes = ALONE,
    on_log: Callable[[Metrics], None] = lambda _: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Train a model on a task, from the newest checkpoint in ``folder`` if there is one.

    A run that is stopped and started again ends with the very weights of one that was not, on the
    same machine with the same PyTorch and number of threads.

    Args:
        model: The model; its weights are changed.
        task: Gives the batches and the score.
        config: Optimizer, schedule, length, state.
        folder: Where metrics and checkpoints are written; by default nowhere.
        run: What else defines the run, as plain data: a checkpoint of another is refused.
        processes: Those that share the work; each calls this function.
        on_log: Called with every line of metrics, in the main process.
        interrupted: Asked after every update; if it says so, the run saves and stops.

    Returns:
        How it went.

    Raises:
        TrainingDiverged: If the loss becomes infinite or not a number; the message names the step
            and the last good checkpoint.
        InputError: If the state cannot be carried as the configuration wants, the folder cannot be
            written to, or its checkpoint cannot be used.
    """
    trainer = _Trainer(model, task, config, processes, folder, run)
    trainer.resume()
    model.train()
    recompute(model.stack, config.checkpoint_activations)
    try:
        trainer.run(on_log, interrupted)
    finally:
        recompute(model.stack, False)
        model.eval()
    return TrainResult(**_result(trainer.progress), curve=trainer.curve)


def _result(progress: Progress) -> dict[str, Any]:
    return {name: value for name, value in vars(progress).items() if name != "losses"}


class _Trainer:
    """A run under way: the optimizer, the carried state, and how far it has come."""

    def __init__(
        self,
        model: AnyModel,
        task: Task,
        config: TrainConfig,
        processes: Processes,
        folder: Path | None,
        run: Any,
    ) -> None:
        check_carried_state(model, task, config)
        self.model, self.task, self.config = model, task, config
        self.processes, self.folder = processes, folder
        settings = {k: v for k, v in asdict(config).items() if k not in FREE}
        self.defined_by = {"run": run, "train": settings}
        self.rows = processes.rows(task.batch_size)
        segment = Segment(model, getattr(torch, config.precision))
        self.segment = processes.wrap(segment, config.parallel)
        self.optimizer = make_optimizer(model, config)
        self.state: Any = None
        self.progress, self.curve = Progress(), list[Metrics]()

    def resume(self) -> None:
        """Go on from the newest checkpoint; without one, begin the file of metrics."""
        if self.folder is None:
            return
        if kept := checkpoint.found(self.folder):
            snapshot = checkpoint.read(kept[-1], self.model, self.optimizer, self.defined_by)
            self.progress = snapshot.progress
            if snapshot.carried is not None:
                rows = range(self.task.batch_size)[self.rows]
                self.state = select_rows(snapshot.carried, rows)
            curve = read_metrics(self.folder / METRICS)
            self.curve = [metrics for metrics in curve if metrics.step <= self.progress.steps]
        file, lines = self.folder / METRICS, [json.dumps(asdict(m)) + "\n" for m in self.curve]
        self.processes.on_main(lambda: write_text(file, "".join(lines)))

    def run(self, on_log: Callable[[Metrics], None], interrupted: Callable[[], bool]) -> None:
        """Update, score, log and save until the end."""
        progress, config = self.progress, self.config
        if progress.stopped == "interrupted":
            progress.stopped = ""
        tokens, seconds = progress.tokens, progress.seconds
        while not progress.stopped:
            started = time.perf_counter()
            share = set_learning_rate(self.optimizer, config, progress.steps)
            progress.losses.append(self._update())
            progress.seconds += time.perf_counter() - started
            progress.steps += 1
            last = progress.steps == config.steps
            score = self._score() if last or _due(progress.steps, config.eval_every) else None
            if last:
                progress.stopped = "finished"
            if _as_good(self.task, score, self.task.solved_at) and progress.steps_to_solve is None:
                progress.steps_to_solve = progress.steps
            if _as_good(self.task, score, config.stop_at):
                progress.stopped = "solved"
            if score is not None or _due(progress.steps, config.log_every):
                speed = (progress.tokens - tokens) / (progress.seconds - seconds)
                tokens, seconds = progress.tokens, progress.seconds
                self._log(score, share * config.lr, speed, on_log)
            if not progress.stopped and self.processes.sum(interrupted()):
                progress.stopped = "interrupted"
            if progress.stopped or _due(progress.steps, config.save_every):
                self._save()

    def _update(self) -> float:
        """Make one update, and return the loss before it."""
        config, step = self.config, self.progress.steps
        first = step * config.accumulate
        pieces = [p for i in range(config.accumulate) for p in self._pieces(first + i)]
        targets_here = sum(int((targets != IGNORE).sum()) for _, targets, _ in pieces)
        targets_in_all = max(1.0, self.processes.sum(targets_here))
        self.optimizer.zero_grad()
        value = 0.0
        for number, (tokens, targets, fresh) in enumerate(pieces, start=1):
            with self.processes.local(self.segment, last=number == len(pieces)):
                logits, self.state = self.segment(tokens, *self._enter(tokens.shape[1], fresh))
                summed = F.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
                )
                loss = summed / targets_in_all
                (loss * self.processes.count).backward()  # gradients are averaged over processes
            self.state = None if self.state is None else detach(self.state)
            value += loss.item()
            self.progress.tokens += targets.numel() * self.processes.count
        value = self.processes.sum(value)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip or math.inf)
        self._check_finite(value, norm.item())
        self.optimizer.step()
        return value

    def _pieces(self, index: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """This process's rows of a batch, cut along the sequence.

        Yields:
            Tokens, targets, and which rows begin anew; ``None`` where training needs no state.
        """
        if self.config.carry_state:
            assert isinstance(self.task, ConsecutiveTask)
            tokens, targets, fresh = self.task.consecutive_batch(index)
        else:
            tokens, targets = self.task.train_batch(index)
            fresh = torch.ones(len(tokens), dtype=torch.bool)
        whole = self.config.segment_len is None and not self.config.carry_state
        length = tokens.shape[1] if self.config.segment_len is None else self.config.segment_len
        for at in range(0, tokens.shape[1], length):
            piece = (part[self.rows, at : at + length] for part in (tokens, targets))
            here = [part.to(self.processes.device) for part in piece]
            anew = fresh[self.rows] & (at == 0)
            yield here[0], here[1], None if whole else anew

    def _enter(
        self, length: int, fresh: Bool[Tensor, " batch"] | None
    ) -> tuple[Any, Bool[Tensor, " batch"] | None]:
        """The state before a segment, and which rows begin anew in spite of it."""
        if fresh is None or self.state is None:
            return None, fresh
        cap = self.config.carry_cap
        if cap is not None:
            position: Int[Tensor, " batch"] = self.state.position.cpu()
            fresh = fresh | (position + length > cap)
        return trim(self.state), fresh

    def _check_finite(self, loss: float, norm: float) -> None:
        what, value = ("gradient", norm) if math.isfinite(loss) else ("loss", loss)
        if math.isfinite(value):
            return
        self._diverged(f"the {what} became {value}", self.progress.steps + 1)

    def _diverged(self, what: str, step: int) -> NoReturn:
        kept = [] if self.folder is None else checkpoint.found(self.folder)
        good = f"; the last good checkpoint is {kept[-1]}" if kept else ""
        raise TrainingDiverged(
            f"{what} at step {step}: lower lr (now {self.config.lr}) or set clip "
            f"(now {self.config.clip}) in a new run{good}",
            steps=step - 1,
        )

    def _score(self) -> float:
        score = evaluate(self.model, self.task, self.task.train_length)[self.task.metric]
        return self.processes.sum(score) / self.processes.count  # so that all stop together

    def _log(
        self, score: float | None, lr: float, speed: float, on_log: Callable[[Metrics], None]
    ) -> None:
        progress, planned = self.progress, self.config.steps
        metrics = Metrics(
            step=progress.steps,
            steps=planned,
            loss=sum(progress.losses) / len(progress.losses),
            metric=score,
            lr=lr,
            tokens_per_second=speed,
            seconds_left=(planned - progress.steps) * progress.seconds / progress.steps,
        )
        progress.losses.clear()
        self.curve.append(metrics)
        self.processes.on_main(lambda: self._tell(metrics, on_log))

    def _tell(self, metrics: Metrics, on_log: Callable[[Metrics], None]) -> None:
        if self.folder is not None:
            append_line(self.folder / METRICS, json.dumps(asdict(metrics)))
        on_log(metrics)

    def _save(self) -> None:
        if (folder := self.folder) is None:
            return
        finite = all(p.isfinite().all() for p in map(local_part, self.model.parameters()))
        if self.processes.sum(not finite):
            self._diverged("a weight became infinite or no number", self.progress.steps)
        snapshot = Snapshot(
            checkpoint.whole_weights(self.model),
            checkpoint.whole_moments(self.model, self.optimizer),
            self.processes.join_rows(self.state) if self.config.carry_state else None,
            self.progress,
        )
        run = {**self.defined_by, "environment": self.processes.environment()}
        self.processes.on_main(
            lambda: checkpoint.write(folder, self.model, snapshot, run, self.config.keep)
        )


def check_carried_state(model: AnyModel, task: Task, config: TrainConfig) -> None:
    """Raise InputError unless the state can be carried as the configuration wants."""
    if not config.carry_state:
        return
    if not isinstance(task, ConsecutiveTask):
        raise InputError(
            "carry_state needs a task that goes on from batch to batch: take text, tokens, "
            "algorithm or random_walk"
        )
    length, limit = task.train_length, model.max_len
    if limit is not None and (config.carry_cap is None or config.carry_cap > limit):
        raise InputError(
            f"the model was made for max_len={limit} tokens: set carry_cap to at most "
            f"that, got {config.carry_cap}"
        )
    if config.carry_cap is None and model.state_grows:
        raise InputError(
            "the state of this model grows with the length: limit what is carried with carry_cap, "
            "or use layers whose state is bounded"
        )
    if config.carry_cap is not None and config.carry_cap < length:
        raise InputError(
            f"carry_cap must be at least the task's length of {length}, got {config.carry_cap}"
        )


def _due(steps: int, every: int) -> bool:
    return bool(every) and steps % every == 0


def _as_good(task: Task, score: float | None, goal: float | None) -> bool:
    """Whether there is a score, and a goal that it reaches."""
    if score is None or goal is None:
        return False
    return score >= goal if task.higher_is_better else score <= goal
