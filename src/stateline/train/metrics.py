"""Metrics of a training run, and the ways it can end."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from stateline.errors import InputError
from stateline.files import read_text, write_text
from stateline.settings import check_settings
from stateline.train.processes import Processes

METRICS = "metrics.jsonl"

Ending = Literal["finished", "solved", "stalled", "interrupted"]
"""Why a run ended: all steps done, ``stop_at`` reached, ``patience`` at its end, or stopped from
outside."""

COMPLETE = ("finished", "solved", "stalled")
"""Endings of runs that are trained to their end."""


class TrainingDiverged(InputError):
    """The loss, its gradient or a weight is no longer finite.

    Attributes:
        steps: Updates that were made before.
    """

    def __init__(self, message: str, steps: int = 0) -> None:
        super().__init__(message)
        self.steps = steps


class NotFinite(Exception):
    """A number of an update is not finite; the message names it."""


@dataclass(frozen=True)
class Metrics:
    """One line of ``metrics.jsonl``.

    Attributes:
        step: Updates so far.
        steps: Planned number of updates.
        loss: Mean loss of the updates since the last line, in nats per target, or in the unit
            of ``match``.
        metric: Score at the training length, if it was measured and is finite, in the unit of the
            task's metric.
        lr: Learning rate of the last update.
        tokens_per_second: Training speed since the last line, without evaluation.
        seconds_left: Estimated time to the last update, at the mean speed so far.
        memory: On a CUDA device, the most bytes of tensors since the last line.
        utilisation: On a CUDA device, the operations per second of the model (three times the
            operations of ``forward``, as ``stateline info`` counts them, without recomputation)
            divided by the rate of matrix products of the same precision, measured when training
            starts.
        gradient_norm: Norm of the whole gradient of the last update, before clipping, if it was
            not skipped.
        skipped: Updates that were skipped so far, since a number was not finite.
    """

    step: int
    steps: int
    loss: float
    metric: float | None
    lr: float
    tokens_per_second: float
    seconds_left: float
    memory: int | None = None
    utilisation: float | None = None
    gradient_norm: float | None = None
    skipped: int = 0


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        steps: Number of updates.
        tokens: Number of tokens trained on.
        seconds: Time spent in updates, without ``compile_seconds``.
        compile_seconds: How much longer the first update of each process took than its second one:
            kernels are compiled or loaded at their first call, and so is what ``compile`` asks for.
        losses: Losses of the updates since the last line of metrics.
        steps_to_solve: Updates before the first score that reached the task's ``solved_at``.
        best: Best score at the training length.
        best_step: Updates before it.
        stale: Scores since then.
        skipped: Updates that were skipped.
        skipped_in_a_row: Of these, the latest ones.
        stopped: Why the run ended; empty while it runs.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    steps_to_solve: int | None = None
    best: float | None = None
    best_step: int | None = None
    stale: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    stopped: str = ""


@dataclass
class TrainResult(Progress):
    """The outcome of a training run: its progress, ``stopped`` by an :data:`Ending`.

    Attributes:
        curve: All lines of metrics.
    """

    curve: list[Metrics] = field(default_factory=list)


def cut_metrics(file: Path, steps: int, processes: Processes) -> list[Metrics]:
    """Read the lines of metrics up to a step, and remove all others from the file.

    All processes must call this. An incomplete last line, left by a kill, is skipped.

    Raises:
        InputError: If another line is malformed, or the file cannot be read or written.
    """
    lines = read_text(file, "file of metrics").splitlines() if steps and file.exists() else []
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            metrics = Metrics(**json.loads(line))
            check_settings("a line of metrics", metrics)
        except (ValueError, TypeError, RecursionError) as error:
            if number < len(lines):
                raise InputError(
                    f"line {number} of {file} is not a line of metrics: restore it, or remove the "
                    "file"
                ) from error
            break
        if metrics.step <= steps:
            found.append(metrics)
    text = "".join(json.dumps(asdict(metrics)) + "\n" for metrics in found)
    processes.on_main(lambda: write_text(file, text))
    return found
