"""A job: one model to be trained on one task from one seed."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.size import meta_model, training_bytes
from stateline.runs.folder import slug
from stateline.tasks import Task
from stateline.train.config import TrainConfig
from stateline.train.fit import check_fit
from stateline.train.optimizer import moment_bytes


@dataclass(frozen=True)
class Job:
    """One model to be trained on one task from one seed.

    Attributes:
        task: The task, with its keywords.
        parameters_wanted: The number of parameters that the width was chosen for.
        model: The configuration of the model.
        training: The configuration of the training, with the seed.
        data: Hash of the task's data, if it has any: a run on other data is another run.
        weights: Hash of the weights that the run starts from; empty if they are random.
        teacher: Hash of the weights of its teacher; empty if it has none.
        trial: The run tries a setting: it is scored while it trains, on data that the final
            scores do not use (``Task.hold_out_validation``), and no model is kept.
        alias: Name of the model in results, if that is not its pattern.
        family: Name of the architecture, if the model is one of several sizes.
        size: The size that the width was chosen for; ``None`` if the model keeps its own width.
        own_size: The actual size of the model in the same unit.
        init: Folder of the weights that the run starts from.
        until: Number of updates after which a trial pauses.
        metric: Name of the task's score.

    Jobs that differ only in ``alias`` and the attributes after it are equal.
    """

    task: str
    parameters_wanted: int
    model: ModelConfig
    training: TrainConfig
    data: str = ""
    weights: str = ""
    teacher: str = ""
    trial: bool = False
    alias: str = field(default="", compare=False)
    family: str = field(default="", compare=False)
    size: int | None = field(default=None, compare=False)
    own_size: int | None = field(default=None, compare=False)
    init: str = field(default="", compare=False)
    until: int | None = field(default=None, compare=False)
    metric: str = field(default="score", compare=False)

    @property
    def name(self) -> str:
        """Name of the run's folder: readable, and unique to the job."""
        return f"{slug(self.task)}--{slug(self.model.pattern)}--{digest(self)}"

    @property
    def label(self) -> str:
        """Name of the model in results."""
        return self.alias or self.model.pattern


def digest(value: Job | ModelConfig) -> str:
    """A short content hash."""
    text = json.dumps(_hashed(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _hashed(settings: Any) -> dict[str, Any]:
    """The settings that are not at their defaults, as plain data: a new setting renames no run."""
    fields = [f for f in dataclasses.fields(settings) if f.compare]
    values = {f.name: getattr(settings, f.name) for f in fields}
    plain = {n: _hashed(v) if dataclasses.is_dataclass(v) else v for n, v in values.items()}
    return {f.name: plain[f.name] for f in fields if values[f.name] != f.default}


def check_job(job: Job, task: Task) -> None:
    """Check, before anything is written, that the task can score the model and carry its state.

    Raises:
        InputError: If the job would fail after it has begun.
    """
    task.check()
    _check_positions(task, job.model.max_len)
    check_fit(meta_model(job.model), task, job.training)


def _check_positions(task: Task, limit: int | None) -> None:
    """Raise InputError unless learned positions cover all lengths that a task asks for."""
    if limit is None:
        return
    longest = max(
        task.train_batch(0).tokens.shape[1], *(task.positions(n) for n in task.eval_lengths)
    )
    if longest > limit:
        raise InputError(
            f"the task trains and scores at up to {longest} tokens, but max_len is {limit}: "
            f"set max_len to at least {longest}"
        )


@dataclass(frozen=True)
class TrainingCosts:
    """Costs of a training run.

    Attributes:
        parameters: Number of parameters.
        rows: Sequences in an update, over all accumulated batches.
        length: Tokens in a sequence.
        flops_per_update: Forward and backward FLOPs of an update.
        memory: Estimated bytes by purpose, for one process.
        state_bytes: State of one sequence at its end; 0 if the model is not causal.
    """

    parameters: int
    rows: int
    length: int
    flops_per_update: float
    memory: dict[str, int]
    state_bytes: int


def training_costs(job: Job, task: Task) -> TrainingCosts:
    """Count parameters and operations, and estimate memory, without building the model."""
    training, model = job.training, meta_model(job.model)
    batch_size, length = task.train_batch(0).tokens.shape[:2]
    rows = batch_size * training.accumulate
    passes = 4 if training.checkpoint_activations else 3  # the backward pass counts twice
    segment = min(length, training.segment_len or length)
    memory = training_bytes(
        model,
        batch_size,
        segment,
        recompute=training.checkpoint_activations,
        loss_chunk=training.loss_chunk,
        precision=training.precision,
    )
    return TrainingCosts(
        parameters=sum(p.numel() for p in model.parameters()),
        rows=rows,
        length=length,
        flops_per_update=passes * model.flops_per_token(length) * rows * length,
        memory=memory | {"optimizer": moment_bytes(model, training)},
        state_bytes=model.state_bytes(length) if model.causal else 0,
    )
