"""Costs of a training run, before it is started."""

from dataclasses import dataclass

from stateline.models.size import meta_model, training_bytes
from stateline.runs.job import Job
from stateline.tasks import Task


@dataclass(frozen=True)
class TrainingCosts:
    """Costs of a training run.

    Attributes:
        parameters: Number of parameters.
        rows: Sequences in an update, over all accumulated batches.
        length: Tokens in a sequence.
        flops_per_update: Forward and backward FLOPs of an update.
        memory: Estimated bytes by purpose, in float32 for one process.
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
    memory = training_bytes(model, batch_size, segment, recompute=training.checkpoint_activations)
    return TrainingCosts(
        parameters=sum(p.numel() for p in model.parameters()),
        rows=rows,
        length=length,
        flops_per_update=passes * model.flops_per_token(length) * rows * length,
        memory=memory,
        state_bytes=model.state_bytes(length) if model.causal else 0,
    )
