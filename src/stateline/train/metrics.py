"""What a training run tells of itself."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from stateline.errors import InputError

METRICS = "metrics.jsonl"


class TrainingDiverged(InputError):
    """The loss or its gradient is no longer a finite number.

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
        lr: Learning rate of the last update.
        tokens_per_second: Since the last line, without evaluation.
        seconds_left: To the end of the plan, at the mean speed so far.
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
        stopped: ``finished`` (all steps done), ``solved`` (``stop_at`` reached) or
            ``interrupted``.
        steps: Updates done.
        seconds: Time spent in updates.
        tokens: Tokens trained on.
        steps_to_solve: Updates before the first score that reached the task's ``solved_at``.
        curve: All lines of metrics.
    """

    stopped: str
    steps: int
    seconds: float
    tokens: int
    steps_to_solve: int | None
    curve: list[Metrics] = field(default_factory=list)


def read_metrics(file: Path) -> list[Metrics]:
    """Lines of metrics; the last may be cut off, where a run was killed.

    Raises:
        InputError: If another line cannot be read.
    """
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(Metrics(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number < len(lines):
                raise InputError(
                    f"line {number} of {file} is no line of metrics: restore it, or remove the file"
                ) from error
    return found
