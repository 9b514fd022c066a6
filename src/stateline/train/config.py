"""How a model is trained, as plain data."""

from dataclasses import dataclass
from typing import Literal

from stateline.errors import InputError
from stateline.models.pattern import check_settings


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
        schedule: Learning rate after the warm-up: ``constant``, ``linear`` (to zero) or
            ``cosine`` (to a tenth).
        warmup_steps: Updates over which the learning rate rises linearly from zero.
        clip: Largest norm of the whole gradient; 0 for none.
        log_every: Updates between two lines of metrics.
        eval_every: Updates between two scores at the training length; 0 for none.
        stop_at: Stop when that score is as good as this.
        seed: Of the initial weights and of the data.
    """

    steps: int = 1000
    lr: float = 1e-3
    ssm_lr: float | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = 100
    clip: float = 1.0
    log_every: int = 50
    eval_every: int = 100
    stop_at: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings("the training configuration", self)
        if self.steps < 1 or self.log_every < 1:
            raise InputError(
                f"steps and log_every must be at least 1, got {self.steps} and {self.log_every}"
            )
        for name in ("lr", "ssm_lr"):
            rate = getattr(self, name)
            if rate is not None and rate <= 0:
                raise InputError(f"{name} must be positive, got {rate}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be from 0 to below 1, got {getattr(self, name)}")
        for name in ("weight_decay", "warmup_steps", "clip", "eval_every", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.seed >= 2**63:
            raise InputError(f"seed must be below 2**63, got {self.seed}")
