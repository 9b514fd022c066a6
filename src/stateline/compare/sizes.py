"""The sizes of the models of a comparison: equal within a tolerance, or refused."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from stateline.compare.recipe import Recipe
from stateline.errors import InputError, check_choice
from stateline.layers import LAYERS
from stateline.models.config import ModelConfig, feed_forward_of
from stateline.models.size import count_parameters, match_width, meta_model
from stateline.pattern import Item, parse_pattern
from stateline.runs.initial import as_in_folder
from stateline.runs.protocol_records import TOLERANCE, MatchedBy, matched_in
from stateline.tasks import Task

D_MODEL = 64
"""Width of the first pattern where nothing else sets a size."""

FINE = {"d_hidden": 4, "d_head": 2, "d_key": 2, "d_inner": 4, "d_ssm": 4, "d_state": 2}
"""Keywords of layers that set a size where the width alone does not, with the multiples to try:
the feed-forward width, heads, inner widths and the state, in this order."""

_SETTINGS = [*(field.name for field in fields(ModelConfig)), "pooling"]

Measure = Callable[[ModelConfig], float]


class Size(NamedTuple):
    """The settings that determine the sizes of the models.

    Attributes:
        match: What they have in common; ``none`` gives all of them one width.
        d_model: Width of the first model.
        parameters: Number of parameters of the first model; with ``match="parameters"``, of all.
        length: Tokens at which FLOPs or state bytes are matched; by default the training length.
    """

    match: MatchedBy = "parameters"
    d_model: int | None = None
    parameters: int | None = None
    length: int | None = None

    @property
    def given(self) -> bool:
        """Whether a size was asked for; it overrides even widths that models set themselves."""
        return self.d_model is not None or self.parameters is not None


class Sized(NamedTuple):
    """A configuration at its width.

    Attributes:
        config: The configuration.
        parameters: Number of parameters that the width was chosen for; the actual one if it was
            chosen for something else.
        size: The wanted size, in the unit in which models are matched; ``None`` if the model keeps
            its own width.
        own_size: The actual size of the model in the same unit.
    """

    config: ModelConfig
    parameters: int
    size: int | None
    own_size: int | None


def choose_widths(
    models: Sequence[Recipe], task: Task, size: Size, options: Mapping[str, Any]
) -> list[Sized]:
    """Each model at its width on one task; the first one sets the size of the others.

    Args:
        models: The models.
        task: Sets their inputs and outputs, and the training length.
        size: How large they are.
        options: Settings for all configurations, over their own.

    Raises:
        InputError: If a model cannot be built, or would have to change a width that its first
            weights fix; or if no choice of its width, feed-forward width, heads or state comes
            within :data:`TOLERANCE` of the size.
    """
    configs = [_config(model, task, size, options) for model in models]
    free = [size.given or not model.own_width for model in models]
    if free[0]:
        width = D_MODEL if size.d_model is None else size.d_model
        configs[0] = replace(configs[0], d_model=width)
    measure = _measure(size, task)
    if size.parameters is not None and measure is not count_parameters:
        configs[0] = _matched(models[0], configs[0], Size(), count_parameters, size.parameters)
    if measure is None:
        for place, moves in enumerate(free):
            if moves:
                configs[place] = replace(configs[place], d_model=configs[0].d_model)
        return [Sized(config, count_parameters(config), None, None) for config in configs]
    by_parameters = measure is count_parameters and size.parameters is not None
    wanted = float(size.parameters or 0) if by_parameters else measure(configs[0])
    return [
        _sized(model, config, size, measure, wanted if moves else None)
        for model, config, moves in zip(models, configs, free, strict=True)
    ]


def _config(model: Recipe, task: Task, size: Size, options: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a model for a task, at the model's own width if it has one."""
    settings = {**model.model, **options}
    for name in settings:
        check_choice("model setting", name, _SETTINGS)
    config = task.model_config(model.pattern, settings)
    if not model.init:
        return config
    if size.given:
        raise InputError(
            f"{model.name} starts from the weights in {model.init}, which fix its width: leave out "
            "d_model and parameters"
        )
    return as_in_folder(config, model.init)


def _sized(
    model: Recipe, config: ModelConfig, size: Size, measure: Measure, wanted: float | None
) -> Sized:
    """A model at a size; at its own width if that is ``None``."""
    if wanted is None:
        return Sized(config, count_parameters(config), None, round(measure(config)))
    if measure(config) != wanted:
        config = _matched(model, config, size, measure, wanted)
    parameters = wanted if measure is count_parameters else count_parameters(config)
    return Sized(config, round(parameters), round(wanted), round(measure(config)))


def _matched(
    model: Recipe, config: ModelConfig, size: Size, measure: Measure, wanted: float
) -> ModelConfig:
    """The first configuration near a size: by its width, or by other sizes inside its layers.

    Raises:
        InputError: If none is near; it names the nearest sizes.
    """
    found: dict[float, ModelConfig] = {}
    for candidate in _candidates(match_width(config, wanted, measure), measure, wanted):
        try:
            own = measure(candidate)
        except InputError:  # heads must divide the width, a state must be even
            continue
        found.setdefault(own, candidate)
        if abs(own - wanted) <= TOLERANCE * wanted:
            return candidate
    below = [own for own in found if own < wanted]
    ends = sorted({*sorted(below)[-1:], *sorted(set(found) - set(below))[:1]})
    had = " or ".join(f"{own:,.0f} (d_model {found[own].d_model})" for own in ends)
    raise InputError(
        f"the models must have {wanted:,.0f} {matched_in(size.match, size.length)} within "
        f"{TOLERANCE:.0%}, but the nearest that {model.name!r} can have is {had}: choose a size "
        "that all can have by d_model or parameters, or match=none"
    )


def _candidates(config: ModelConfig, measure: Measure, wanted: float) -> Iterator[ModelConfig]:
    """A configuration at the widths around its own, then with other sizes inside its layers."""
    yield config
    for change in (-1, 1, -2, 2, -4, 4):
        if config.d_model + change > 0:
            yield replace(config, d_model=config.d_model + change)
    for layer, keyword in _offered(config):
        yield from _interpolated(config, layer, keyword, measure, wanted)


def _offered(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """The layers of a configuration, each with its size keywords that the pattern does not set."""
    given = dict[str, set[str]]()
    waiting = list[Item](parse_pattern(config.pattern))
    while waiting:
        item = waiting.pop()
        waiting += itertools.chain(item.core, *item.others)
        given.setdefault(item.name, set()).update(item.keywords, config.layers.get(item.name, {}))
    if config.feed_forward != "none":
        name, _ = feed_forward_of(config)
        given.setdefault(name, set(config.layers.get(name, {})))
    for keyword in FINE:
        for name in given:
            known = inspect.signature(LAYERS[name]).parameters if name in LAYERS else ()
            if keyword in known and keyword not in given[name]:
                yield name, keyword


def _interpolated(
    config: ModelConfig, layer: str, keyword: str, measure: Measure, wanted: float
) -> Iterator[ModelConfig]:
    """The values of a keyword around a size, by linear interpolation from two others."""

    def with_value(value: int) -> ModelConfig:
        own = {**config.layers.get(layer, {}), keyword: value}
        return replace(config, layers={**config.layers, layer: own})

    step, width = FINE[keyword], config.d_model
    try:
        low, high = (measure(with_value(step * max(1, n * width // step))) for n in (1, 2))
    except InputError:
        return
    if low == high:
        return
    at = width + (wanted - low) / (high - low) * width
    for value in (step * max(1, int(at / step)), step * max(1, int(at / step) + 1)):
        yield with_value(value)


def _measure(size: Size, task: Task) -> Measure | None:
    """The matched size as a function of a configuration; ``None`` if only widths are equal."""
    if size.match in ("none", "parameters"):
        return None if size.match == "none" else count_parameters
    length = size.length or task.train_batch(0).tokens.shape[1]
    if size.match == "flops":
        return lambda config: meta_model(config).flops_per_token(length)
    return lambda config: meta_model(config).state_bytes(length)
