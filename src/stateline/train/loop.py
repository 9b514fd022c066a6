"""The training loop."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.files import append_line, finite
from stateline.generate.session_state import OutputIsNaN, check_model
from stateline.layers.compose import checkpoint_activations
from stateline.models.factory import AnyModel
from stateline.settings import check_kind, uncompiled
from stateline.tasks.base import Task
from stateline.train.batches import Batches
from stateline.train.checkpoint import Save
from stateline.train.config import TrainConfig
from stateline.train.distillation import frozen, read_teacher, share_weights
from stateline.train.fit import check_fit, check_schedule
from stateline.train.folder import CHECKPOINTS, found
from stateline.train.metrics import (
    COMPLETE,
    METRICS,
    Metrics,
    NotFinite,
    Progress,
    TrainingDiverged,
    TrainResult,
    cut_metrics,
)
from stateline.train.optimizer import averaged, exchange, set_learning_rate
from stateline.train.parts import Copies
from stateline.train.processes import Processes, own_rows
from stateline.train.restore import read
from stateline.train.same_run import check_alike, identity, settings_that_count
from stateline.train.teacher import Teacher
from stateline.train.update import Updater
from stateline.train.usage import Usage

ALONE = Processes()

_log = logging.getLogger("stateline")


def train(
    model: AnyModel,
    task: Task,
    config: TrainConfig,
    *,
    folder: str | Path | None = None,
    run: Any = None,
    processes: Processes | None = None,
    on_log: Callable[[Metrics], None] = lambda _: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Train a model on a task, from the newest checkpoint in ``folder`` if there is one.

    A run in ``folder`` may have had fewer ``steps``: from its newest checkpoint, it continues with
    the learning rates of the longer run.

    A run that is stopped and continued ends with the same weights, bit by bit, as one that was not
    stopped, on the same machine with the same PyTorch and number of threads.

    Args:
        model: The model, on the device of this process; its weights are changed.
        task: Gives the batches and the score.
        config: Optimizer, schedule, length, state.
        folder: Where metrics and checkpoints are written; by default nowhere.
        run: What else defines the run, as plain data; checkpoints of other runs are refused. By
            default, the model's configuration and the first training batch.
        processes: The processes that share the work; each calls this function. By default this
            one alone, on the device of the model.
        on_log: Called with every line of metrics, in the main process.
        interrupted: Called after every update; if it returns true, the run saves and stops.

    Raises:
        TrainingDiverged: If the loss, its gradient or a weight is no longer finite; the message
            names the step and the last good checkpoint.
        InputError: If all weights are frozen or were made in inference mode, the task cannot train
            the model as the configuration says, the processes were given different runs, the folder
            cannot be written to, or its checkpoint cannot be used.
    """
    with prepared(model, task, config, folder=folder, run=run, processes=processes) as trainer:
        return trainer.train(on_log, interrupted)


@contextmanager
def prepared(
    model: AnyModel,
    task: Task,
    config: TrainConfig,
    *,
    folder: str | Path | None = None,
    run: Any = None,
    processes: Processes | None = None,
) -> Iterator["Trainer"]:
    """A training that has read the newest checkpoint in ``folder``, if there is one.

    Arguments and errors are those of :func:`train`, which is this and :meth:`Trainer.train`.
    """
    check_model(model)
    check_kind("task", task, Task, "make_task('copying')")
    check_kind("config", config, TrainConfig, "TrainConfig(steps=100)")
    if uncompiled(model) is not model:
        _log.warning("the model inside torch.compile is trained; compile=True compiles its updates")
        model = uncompiled(model)
    processes = processes or Processes(device=next(model.parameters()).device)
    folder = None if folder is None else Path(folder)
    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as opened:
        teacher = read_teacher(model, config)
        opened.enter_context(frozen(model, config, teacher))
        trainer = Trainer(model, task, config, processes, folder, run, teacher, opened)
        opened.enter_context(closing(trainer.batches))
        opened.enter_context(_in_training(model, config))
        trainer.resume()
        share_weights(model, teacher)
        del teacher  # it goes with the training, before scores need its memory
        yield trainer


@contextmanager
def _in_training(model: AnyModel, config: TrainConfig) -> Iterator[None]:
    """Turn on training mode and, if set, activation checkpointing; turn both off at the end."""
    model.train()
    try:
        checkpoint_activations(model.stack, config.checkpoint_activations)
        yield
    finally:
        checkpoint_activations(model.stack, False)
        model.eval()
        mixtures: list[Any] = [m for m in model.modules() if getattr(m, "balances", False)]
        for mixture in mixtures:
            mixture.positions = mixture.uses = None


class Trainer:
    """A run in progress; what :func:`prepared` has ``opened`` for it is closed at its end."""

    def __init__(
        self,
        model: AnyModel,
        task: Task,
        config: TrainConfig,
        processes: Processes,
        folder: Path | None,
        run: Any,
        teacher: Teacher | None = None,
        opened: ExitStack | None = None,
    ) -> None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InputError(
                "training needs a weight that may change, got a model with all weights frozen: set "
                "requires_grad of some to true"
            )
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise InputError(
                "training needs weights that have gradients, got a model that was made inside "
                "torch.inference_mode: make or load it outside"
            )
        check_fit(model, task, config)
        if config.keep_best and folder is None:
            raise InputError("keep_best keeps a checkpoint: give a folder")
        self.model, self.task, self.config = model, task, config
        self.processes, self.folder, self.opened = processes, folder, opened or ExitStack()
        if run is None and folder is not None:
            run = identity(task, model.config)
        self.defined_by = {"run": run, "train": settings_that_count(config)}
        self.kept = [] if folder is None else found(folder)
        if not self.kept:
            check_schedule(config)
        newest = self.kept[-1].name if self.kept else "none"
        own = {"run": run, "train": asdict(config), "folder": {"newest checkpoint": newest}}
        check_alike(processes.share(own))
        self.batches = Batches(task, config, processes)
        self.update = Updater(model, task, config, processes, teacher)
        self.progress, self.curve = Progress(), list[Metrics]()
        self.first = list[float]()  # seconds of the first two updates of this process
        self.saving: Save | None = None
        self.copies = Copies()
        precision = getattr(torch, config.precision)
        self.usage = Usage(model, task.train_length, precision, processes.device)

    def resume(self) -> None:
        """Continue from the newest checkpoint in the folder, or begin.

        Raises:
            InputError: If the folder cannot be written to, or its checkpoint cannot be used; then
                nothing was written.
        """
        if self.folder is None:
            return
        if self.kept:
            self.progress = read(self.kept[-1], self.update, self.defined_by)
        self.curve = cut_metrics(self.folder / METRICS, self.progress.steps, self.processes)

    def train(
        self, on_log: Callable[[Metrics], None], interrupted: Callable[[], bool]
    ) -> TrainResult:
        """Train to the end, once: afterwards the optimizer and a teacher are gone.

        Raises:
            TrainingDiverged: As :func:`train` does.
        """
        with self.opened:
            self.run(on_log, interrupted)
            self.finish()
        del self.update
        return TrainResult(**vars(self.progress), curve=self.curve)

    def run(self, on_log: Callable[[Metrics], None], interrupted: Callable[[], bool]) -> None:
        """Update, score, log and save until the end."""
        progress, config = self.progress, self.config
        more = progress.stopped == "finished" and progress.steps < config.steps
        if more or progress.stopped == "interrupted":
            progress.stopped = ""
        tokens, spent, length = progress.tokens, 0.0, config.best_length
        while not progress.stopped:
            started = time.perf_counter()
            share = set_learning_rate(self.update.optimizer, config, progress.steps)
            norm = self._update()
            took = time.perf_counter() - started
            self._spend(took)
            spent += took
            progress.steps += 1
            last = progress.steps == config.steps
            score = self._score() if last or _due(progress.steps, config.eval_every) else None
            if last:
                progress.stopped = "finished"
            if _as_good(self.task, score, self.task.solved_at) and progress.steps_to_solve is None:
                progress.steps_to_solve = progress.steps
            if _as_good(self.task, score, config.stop_at):
                progress.stopped = "solved"
            best = self._compare(score if score is None or length is None else self._score(length))
            if not progress.stopped and progress.stale == config.patience:
                progress.stopped = "stalled"
            if score is not None or _due(progress.steps, config.log_every):
                speed = (progress.tokens - tokens) / spent
                tokens, spent = progress.tokens, 0.0
                self._log(score, share * config.lr, norm, speed, on_log)
            if self._any(not progress.stopped and interrupted()):
                progress.stopped = "interrupted"
            kept = best and config.keep_best
            if progress.stopped or kept or _due(progress.steps, config.save_every):
                self.save()
        self.commit()

    def finish(self) -> None:
        """Give the model the weights that it ends with: those of the best score, or averages."""
        progress = self.progress
        if progress.stopped not in COMPLETE:
            return
        if self.config.keep_best and progress.best_step not in (None, progress.steps):
            assert self.folder is not None
            path = self.folder / CHECKPOINTS / f"step-{progress.best_step:08}"
            read(path, self.update, self.defined_by)
        exchange(self.update.optimizer)

    def _spend(self, seconds: float) -> None:
        """Add the time of an update; what the first takes longer than the second is compiling."""
        progress = self.progress
        progress.seconds += seconds
        if len(self.first) < 2:
            self.first.append(seconds)
            compiling = max(0.0, self.first[0] - seconds)
            progress.seconds -= compiling
            progress.compile_seconds += compiling

    def _update(self) -> float | None:
        """Make one update, and return the norm of the gradient; none if it was skipped."""
        progress, micro_batches = self.progress, self.batches.update(self.progress.steps)
        tokens = sum(micro.targets.shape[:2].numel() for micro in micro_batches)
        progress.tokens += tokens * self.processes.count
        try:
            loss, norm = self.update(micro_batches, progress.steps)
        except NotFinite as error:
            if progress.skipped_in_a_row == self.config.max_skipped:
                self._diverged(str(error), progress.steps + 1)
            _log.warning("update %d is skipped: %s", progress.steps + 1, error)
            self.update.forget()
            progress.skipped += 1
            progress.skipped_in_a_row += 1
            return None
        progress.losses.append(loss)
        progress.skipped_in_a_row = 0
        return norm

    def _compare(self, score: float | None) -> bool:
        """Whether a score is the best so far."""
        progress = self.progress
        if score is None or not math.isfinite(score):
            return False
        best = progress.best is None or not _as_good(self.task, progress.best, score)
        if best:
            progress.best, progress.best_step = score, progress.steps
        progress.stale = 0 if best else progress.stale + 1
        return best

    def _diverged(self, what: str, step: int) -> NoReturn:
        self.commit()
        kept = [] if self.folder is None else found(self.folder)
        good = f"; the last good checkpoint is {kept[-1]}" if kept else ""
        raise TrainingDiverged(
            f"{what} at step {step}: lower lr (now {self.config.lr}) or set clip "
            f"(now {self.config.clip}) in a new run{good}",
            steps=step - 1,
        )

    def _score(self, length: int | None = None) -> float:
        """The score at a length, by default that of training."""
        self.batches.settle()
        try:
            with averaged(self.update.optimizer), self.processes.scoring(self.model):
                scores = evaluate(
                    self.model, self.task, length or self.task.train_length, training=True
                )
        except OutputIsNaN:
            self._diverged("the output became NaN", self.progress.steps)
        score = scores[self.task.metric]
        return self.processes.sum(score) / self.processes.count  # one for all: they stop together

    def _log(
        self,
        score: float | None,
        lr: float,
        norm: float | None,
        speed: float,
        on_log: Callable[[Metrics], None],
    ) -> None:
        progress, planned = self.progress, self.config.steps
        if not progress.losses:  # all updates since the last line were skipped
            return
        metrics = Metrics(
            step=progress.steps,
            steps=planned,
            loss=sum(progress.losses) / len(progress.losses),
            metric=finite(score),
            lr=lr,
            tokens_per_second=speed,
            seconds_left=(planned - progress.steps) * progress.seconds / progress.steps,
            memory=self.usage.memory(),
            utilisation=self.usage.utilisation(speed / self.processes.count),
            gradient_norm=norm,
            skipped=progress.skipped,
        )
        progress.losses.clear()
        self.curve.append(metrics)
        self.processes.on_main(lambda: self._tell(metrics, on_log))

    def _tell(self, metrics: Metrics, on_log: Callable[[Metrics], None]) -> None:
        if self.folder is not None:
            append_line(self.folder / METRICS, json.dumps(asdict(metrics)))
        on_log(metrics)

    def save(self) -> None:
        """Write a checkpoint: at once if one process trains on the CPU, else in the background."""
        if (folder := self.folder) is None:
            return
        if self.processes.sum(not self._finite()):
            self._diverged("a weight or its moments became infinite or NaN", self.progress.steps)
        self.commit()
        record = {
            "progress": asdict(self.progress),
            **self.defined_by,
            "environment": self.processes.environment(),
        }
        carried = self.update.state if self.config.carry_state else None
        model, optimizer = self.model, self.update.optimizer
        self.saving = Save(folder, model, optimizer, carried, record, self.processes, self.copies)
        self._any(False)

    def _any(self, value: bool) -> bool:
        """Whether ``value`` is true in any process; commits a checkpoint that all have written."""
        writing = self.saving is not None and not self.saving.written
        any_true, any_writing = self.processes.sums(value, writing)
        if self.saving is not None and not any_writing:
            saving, self.saving = self.saving, None
            saving.commit(self.config.keep)
        return bool(any_true)

    def commit(self) -> None:
        """Wait for the checkpoint that is being written, without a time limit."""
        while self.saving is not None:
            self._any(False)
            time.sleep(0.02)

    def _finite(self) -> bool:
        """Whether this process's weights and moments are finite; one synchronisation."""
        moments = [m for s in self.update.optimizer.state.values() for m in s.values()]
        own = [own_rows(t)[0].detach() for t in (*self.model.parameters(), *moments) if t.ndim]
        if torch.stack([tensor.sum() for tensor in own]).isfinite().all():
            return True
        return all(bool(tensor.isfinite().all()) for tensor in own)  # a sum may overflow


def _due(steps: int, every: int) -> bool:
    return bool(every) and steps % every == 0


def _as_good(task: Task, score: float | None, goal: float | None) -> bool:
    """Whether there is a score that reaches the goal."""
    if score is None or goal is None:
        return False
    return score >= goal if task.higher_is_better else score <= goal
