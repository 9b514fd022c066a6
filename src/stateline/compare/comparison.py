"""What a comparison consists of: every model, at its size, on every task, from every seed."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.pattern import format_pattern, parse_pattern
from stateline.models.presets import find_preset
from stateline.models.size import count_parameters, match_width
from stateline.runs.job import Job
from stateline.tasks import Task, make_task
from stateline.train.config import TrainConfig

D_MODEL = 64
"""Width of the first pattern where nothing else sets a size."""

_MOST_PARAMETERS = 10**11


@dataclass(frozen=True)
class Comparison:
    """What to compare.

    The first model sets the number of parameters on each task: by ``d_model`` if that is given, by
    its own width if it is a preset, and by a width of 64 otherwise. All other patterns get the
    width at which their number of parameters is nearest. Presets keep their own width, unless
    ``d_model`` or ``parameters`` is given.

    Attributes:
        patterns: Architectures: patterns, or names of presets such as ``mamba-130m``, whose
            vocabulary is replaced by that of the task.
        tasks: Tasks, in the grammar of patterns: ``copying(max_len=20)``. A repeat count is a
            number of seeds: ``associative_recall*3``.
        d_model: Width of the first model, whose number of parameters all others match.
        parameters: Number of parameters that all models match instead.
        steps: Training steps; by default the task's own.
        lr: Learning rate; by default the task's own.
        precision: Precision of training; by default the task's own, which is mostly float32.
    """

    patterns: Sequence[str]
    tasks: Sequence[str]
    d_model: int | None = None
    parameters: int | None = None
    steps: int | None = None
    lr: float | None = None
    precision: Literal["float32", "bfloat16"] | None = None


class _Model(NamedTuple):
    """An architecture: the settings of its configuration, and its name if it is a preset."""

    pattern: str
    settings: Mapping[str, Any]
    preset: str


def make_tasks(comparison: Comparison) -> dict[str, Task]:
    """The tasks of a comparison by spec, each constructed once.

    Raises:
        InputError: If a task or one of its keywords cannot be used.
    """
    return {spec: make_task(spec) for spec, _ in map(_seeds, comparison.tasks)}


def plan(comparison: Comparison, tasks: Mapping[str, Task] | None = None) -> list[Job]:
    """All training runs, each at its width.

    Args:
        comparison: What to compare.
        tasks: The tasks of :func:`make_tasks`; by default they are constructed here.

    Raises:
        InputError: If a pattern, task or setting cannot be used.
    """
    if not comparison.patterns or not comparison.tasks:
        raise InputError("a comparison needs at least one pattern and one task")
    wanted = comparison.parameters
    if wanted is not None and not 1 <= wanted <= _MOST_PARAMETERS:
        bound = "at least 1" if wanted < 1 else f"at most {_MOST_PARAMETERS:,}"
        raise InputError(f"parameters must be {bound}, got {wanted}")
    models = [_model(text) for text in comparison.patterns]
    tasks = make_tasks(comparison) if tasks is None else tasks
    jobs = []
    for spec, seeds in map(_seeds, comparison.tasks):
        task = tasks[spec]
        data = str(task.describe().get("sha256", ""))
        for model, (config, size) in zip(models, _sized(comparison, task, models), strict=True):
            jobs += [
                Job(spec, size, config, _training(comparison, task, seed), data, model.preset)
                for seed in range(seeds)
            ]
    return list(dict.fromkeys(jobs))


def _model(text: str) -> _Model:
    preset = find_preset(text)
    if preset is None:
        return _Model(format_pattern(parse_pattern(text)), {}, "")
    settings = dataclasses.asdict(preset)
    del settings["pattern"], settings["vocab_size"]  # the vocabulary is the task's
    return _Model(preset.pattern, settings, text)


def _sized(
    comparison: Comparison, task: Task, models: Sequence[_Model]
) -> list[tuple[ModelConfig, int]]:
    """Each model at its width, with the number of parameters that the width was chosen for."""
    configs = [task.model_config(model.pattern, model.settings) for model in models]
    wanted, d_model = comparison.parameters, comparison.d_model
    keep_presets = wanted is None and d_model is None
    if wanted is None:
        if not (keep_presets and models[0].preset):
            width = D_MODEL if d_model is None else d_model
            configs[0] = dataclasses.replace(configs[0], d_model=width)
        wanted = count_parameters(configs[0])
    sized = []
    for model, config in zip(models, configs, strict=True):
        own = count_parameters(config)
        if model.preset and keep_presets:
            sized.append((config, own))
        else:
            sized.append((config if own == wanted else match_width(config, wanted), wanted))
    return sized


def _seeds(task: str) -> tuple[str, int]:
    """A task without its repeat count, and the count, which is a number of seeds."""
    items = parse_pattern(task)
    return format_pattern((items[0]._replace(repeat=1), *items[1:])), items[0].repeat


def _training(comparison: Comparison, task: Task, seed: int) -> TrainConfig:
    given = {name: getattr(comparison, name) for name in ("steps", "lr", "precision")}
    chosen = {name: value for name, value in given.items() if value is not None}
    return TrainConfig(**{**task.training, **chosen, "seed": seed})
