"""How a model is trained, as plain data."""

from dataclasses import dataclass
from typing import Literal

from stateline.errors import InputError
from stateline.models.pattern import check_settings

_LEAST = {
    1: ("steps", "log_every", "accumulate", "keep", "segment_len", "carry_cap"),
    0: ("weight_decay", "warmup_steps", "clip", "eval_every", "save_every", "seed"),
}


@dataclass(frozen=True)
class TrainConfig:
    """AdamW with a learning-rate schedule.

    Attributes:
        steps: Number of updates.
        lr: Highest learning rate.
        ssm_lr: The same for the steps, transitions and input maps of state space layers;
            by default the lower of ``lr`` and 0.001, as in the official H3
            configurations.
        weight_decay: On matrices; not on norms, biases and the parameters just named.
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of their squares.
        accumulate: Batches whose gradients make one update.
        precision: ``bfloat16`` computes matrix products in it (autocast); weights, the optimizer
            and accumulating states stay in float32.
        checkpoint_activations: Keep only the input of every block for the backward pass, and
            compute the rest again: less memory, about a third more time.
        carry_state: The state after a batch is where the next batch starts (truncated
            backpropagation through time); the task must be one that goes on: a text, which is then
            read in order, ``algorithm`` or ``random_walk``.
        carry_cap: Tokens after which a carried state starts anew; needed if the state grows.
        segment_len: Cut backpropagation, and detach the state, every so many tokens of a row; by
            default not within a row.
        schedule: Learning rate after the warm-up: ``constant``, ``linear`` (to zero) or
            ``cosine`` (to a tenth).
        warmup_steps: Updates over which the learning rate rises linearly from zero; never more
            than half of all.
        clip: Largest norm of the whole gradient; 0 for none.
        log_every: Updates between two lines of metrics.
        eval_every: Updates between two scores at the training length; 0 for none.
        stop_at: Stop when that score is as good as this.
        save_every: Updates between two checkpoints; 0 for none but the last.
        keep: Number of checkpoints kept.
        parallel: With more than one process: ``ddp`` (each has the whole model) or ``fsdp`` (each
            has a part of every parameter).
        seed: Of the initial weights and of the data.
    """

    steps: int = 1000
    lr: float = 1e-3
    ssm_lr: float | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    accumulate: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    checkpoint_activations: bool = False
    carry_state: bool = False
    carry_cap: int | None = None
    segment_len: int | None = None
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = 100
    clip: float = 1.0
    log_every: int = 50
    eval_every: int = 100
    stop_at: float | None = None
    save_every: int = 500
    keep: int = 2
    parallel: Literal["ddp", "fsdp"] = "ddp"
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings("the training configuration", self)
        for least, names in _LEAST.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and value < least:
                    raise InputError(f"{name} must be at least {least}, got {value}")
        if self.carry_cap is not None and not self.carry_state:
            raise InputError("carry_cap limits a carried state: set carry_state, too")
        for name in ("lr", "ssm_lr"):
            rate = getattr(self, name)
            if rate is not None and rate <= 0:
                raise InputError(f"{name} must be positive, got {rate}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be from 0 to below 1, got {getattr(self, name)}")
        if self.seed >= 2**63:
            raise InputError(f"seed must be below 2**63, got {self.seed}")
