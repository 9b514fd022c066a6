"""The widths of the models of a comparison: what they are matched by."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from stateline.compare.recipe import Model
from stateline.errors import InputError, unknown_name
from stateline.models.config import ModelConfig
from stateline.models.size import count_parameters, match_width, meta_model
from stateline.runs.initial import as_in_folder, initial_config
from stateline.runs.protocol_records import MatchedBy
from stateline.tasks import Task

D_MODEL = 64
"""Width of the first pattern where nothing else sets a size."""

_SETTINGS = [field.name for field in dataclasses.fields(ModelConfig)]

Measure = Callable[[ModelConfig], float]


class Size(NamedTuple):
    """What sets the size of the models.

    Attributes:
        match: What they have in common; ``none`` gives all of them one width.
        d_model: Width of the first model.
        parameters: Number of parameters of the first model, and of all that match by it.
    """

    match: MatchedBy = "parameters"
    d_model: int | None = None
    parameters: int | None = None

    @property
    def given(self) -> bool:
        """Whether models that have a width of their own change it."""
        return self.d_model is not None or self.parameters is not None


class Sized(NamedTuple):
    """A configuration at its width.

    Attributes:
        config: The configuration.
        parameters: Number of parameters that the width was chosen for; the actual one if it was
            chosen for something else.
        size: What the width was chosen for, in what the models are matched by; ``None`` if the
            model keeps its own width.
        own_size: What the model has of it.
    """

    config: ModelConfig
    parameters: int
    size: int | None
    own_size: int | None


def choose_widths(
    models: Sequence[Model], task: Task, size: Size, options: Mapping[str, Any]
) -> list[Sized]:
    """Each model at its width on one task; the first one sets the size of the others.

    Args:
        models: The models.
        task: Sets their inputs and outputs, and the training length.
        size: How large they are.
        options: Settings for all configurations, over their own.

    Raises:
        InputError: If a model cannot be built, or would have to change a width that its first
            weights fix.
    """
    configs = [_config(model, task, size, options) for model in models]
    if size.given or not models[0].own_width:
        width = D_MODEL if size.d_model is None else size.d_model
        configs[0] = dataclasses.replace(configs[0], d_model=width)
    measure = _measure(size.match, task)
    if size.parameters is not None and measure is not count_parameters:
        configs[0] = match_width(configs[0], size.parameters)
    if measure is None:
        width = configs[0].d_model
        free = [size.given or not model.own_width for model in models]
        return [
            Sized(own, count_parameters(own), None, None)
            for config, moves in zip(configs, free, strict=True)
            for own in [dataclasses.replace(config, d_model=width) if moves else config]
        ]
    by_parameters = measure is count_parameters and size.parameters is not None
    wanted = float(size.parameters or 0) if by_parameters else measure(configs[0])
    return [
        _matched(config, measure, None if model.own_width and not size.given else wanted)
        for model, config in zip(models, configs, strict=True)
    ]


def _config(model: Model, task: Task, size: Size, options: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a model for a task, at the width that it may have of its own."""
    settings, known = {**model.settings, **options}, [*_SETTINGS, "pooling"]
    for name in settings:
        if name not in known:
            raise unknown_name("model setting", name, known)
    config = task.model_config(model.pattern, settings)
    if not model.init:
        return config
    if size.given:
        raise InputError(
            f"{model.name} starts from the weights in {model.init}, which fix its width: leave out "
            "d_model and parameters"
        )
    return as_in_folder(config, initial_config(model.init), model.init)


def _matched(config: ModelConfig, measure: Measure, wanted: float | None) -> Sized:
    """A configuration at the width that is nearest to a size; at its own if that is ``None``."""
    if wanted is not None and measure(config) != wanted:
        config = match_width(config, wanted, measure)
    parameters = count_parameters(config)
    if wanted is not None and measure is count_parameters:
        parameters = round(wanted)
    return Sized(
        config, parameters, None if wanted is None else round(wanted), round(measure(config))
    )


def _measure(match: MatchedBy, task: Task) -> Measure | None:
    """What models are matched by, as a function of a configuration; ``None`` for the width."""
    if match == "none":
        return None
    if match == "parameters":
        return count_parameters
    length = task.train_batch(0).tokens.shape[1]
    return partial(_flops if match == "flops" else _state, length=length)


def _flops(config: ModelConfig, length: int) -> float:
    return meta_model(config).flops_per_token(length)


def _state(config: ModelConfig, length: int) -> float:
    return meta_model(config).state_bytes(length)
