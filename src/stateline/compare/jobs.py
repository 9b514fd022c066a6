"""What a comparison consists of: every model, at its size, on every task, from every seed."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.pattern import format_pattern, parse_pattern
from stateline.models.size import count_parameters, match_width
from stateline.tasks import Task, make_task
from stateline.train.config import TrainConfig

_MOST_PARAMETERS = 10**11


@dataclass(frozen=True)
class Comparison:
    """What to compare.

    Attributes:
        patterns: Architectures.
        tasks: Tasks, in the grammar of patterns: ``copying(max_len=20)``. A repeat count is a
            number of seeds: ``associative_recall*3``.
        d_model: Width of the first pattern, whose number of parameters the others match.
        parameters: Number of parameters to match instead.
        steps: Training steps; by default what suits the task.
        lr: By default what suits the task.
    """

    patterns: Sequence[str]
    tasks: Sequence[str]
    d_model: int = 64
    parameters: int | None = None
    steps: int | None = None
    lr: float | None = None


@dataclass(frozen=True)
class Job:
    """One model to be trained on one task from one seed.

    Attributes:
        task: The task, with its keywords.
        parameters_wanted: What the width was chosen by.
        model: What is trained.
        training: How; also has the seed.
        data: Hash of the task's data, where it has any: a run on other data is another run.
    """

    task: str
    parameters_wanted: int
    model: ModelConfig
    training: TrainConfig
    data: str = ""

    @property
    def name(self) -> str:
        """Folder name: legible, and different for whatever differs."""
        return f"{slug(self.task)}--{slug(self.model.pattern)}--{digest(self)}"


def plan(comparison: Comparison) -> list[Job]:
    """All training runs, each at its width.

    Raises:
        InputError: If a pattern, task or setting cannot be used.
    """
    if not comparison.patterns or not comparison.tasks:
        raise InputError("a comparison needs at least one pattern and one task")
    if comparison.parameters is not None and comparison.parameters < 1:
        raise InputError(f"parameters must be at least 1, got {comparison.parameters}")
    if comparison.parameters is not None and comparison.parameters > _MOST_PARAMETERS:
        raise InputError(
            f"parameters must be at most {_MOST_PARAMETERS:,}, got {comparison.parameters}"
        )
    patterns = [format_pattern(parse_pattern(pattern)) for pattern in comparison.patterns]
    jobs = []
    for spec, seeds in map(_seeds, comparison.tasks):
        task = make_task(spec)
        models = [task.model_config(pattern, {}) for pattern in patterns]
        wanted = comparison.parameters
        if wanted is None:
            yardstick = dataclasses.replace(models[0], d_model=comparison.d_model)
            wanted = count_parameters(yardstick)
            models[0] = yardstick
        sized = [m if wanted == count_parameters(m) else match_width(m, wanted) for m in models]
        data = str(task.describe().get("sha256", ""))
        for model in sized:
            jobs += [
                Job(spec, wanted, model, _training(comparison, task, seed), data)
                for seed in range(seeds)
            ]
    return list(dict.fromkeys(jobs))


def _seeds(task: str) -> tuple[str, int]:
    """A task without its repeat count, which is a number of seeds."""
    items = parse_pattern(task)
    return format_pattern((items[0]._replace(repeat=1), *items[1:])), items[0].repeat


def _training(comparison: Comparison, task: Task, seed: int) -> TrainConfig:
    settings: dict[str, Any] = {**task.training, "seed": seed}
    if comparison.steps is not None:
        settings["steps"] = comparison.steps
    if comparison.lr is not None:
        settings["lr"] = comparison.lr
    return TrainConfig(**settings)


def digest(value: Job | ModelConfig) -> str:
    """A few characters that differ for whatever differs."""
    text = json.dumps(dataclasses.asdict(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def slug(text: str) -> str:
    """What of a text can stand in a file name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:60]
