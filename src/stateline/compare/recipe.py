"""The models of a comparison: patterns, presets, folders of models, and recipes."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stateline.errors import InputError
from stateline.generate.runs import find_model
from stateline.models.checkpoint import CONFIG
from stateline.models.pattern import canonical_pattern
from stateline.models.presets import find_preset
from stateline.runs.initial import initial_config

_ALIAS = re.compile(r"(?P<name>[^\s(),=*\"/][^(),=*\"/]*)=(?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """A model of a comparison with settings of its own.

    Attributes:
        pattern: A pattern, the name of a preset, or the folder of a model, ours or published,
            whose weights its runs start from.
        name: Name in the results; by default the pattern, or the name of the preset or folder.
        model: Settings of its configuration, without the vocabulary. With ``d_model`` among them
            it keeps its width, as a preset does.
        train: Settings of its training. A ``seed`` among them is not used.
    """

    pattern: str
    name: str = ""
    model: Mapping[str, Any] = field(default_factory=dict, hash=False)
    train: Mapping[str, Any] = field(default_factory=dict, hash=False)


class Model(NamedTuple):
    """A model of a comparison.

    Attributes:
        pattern: Its layers.
        name: Name in the results.
        settings: Settings of its configuration.
        train: Settings of its training.
        own_width: It keeps its width unless the comparison asks for a size.
        init: Folder of its first weights.
    """

    pattern: str
    name: str
    settings: Mapping[str, Any]
    train: Mapping[str, Any]
    own_width: bool = False
    init: str = ""


def split_alias(text: str) -> tuple[str, str]:
    """Split ``name=pattern``; the name is empty if there is none.

    Example:
        >>> split_alias("rope=attention(position=rope)*2"), split_alias("attention(position=rope)")
        (('rope', 'attention(position=rope)*2'), ('', 'attention(position=rope)'))
    """
    found = _ALIAS.fullmatch(text.strip())
    return (found["name"].strip(), found["rest"].strip()) if found else ("", text)


def read_models(given: Sequence[str | Recipe]) -> list[Model]:
    """The models that texts and recipes stand for.

    Raises:
        InputError: If a pattern is malformed, a folder holds no model to start from, or two
            different models have one name.
    """
    models = [_read_model(one) for one in given]
    known: dict[str, Model] = {}
    for model in models:
        if known.setdefault(model.name, model) != model:
            raise InputError(
                f"two different models are called {model.name!r}: name them, as in "
                f"'first={model.name}'"
            )
    return list(known.values())


def _read_model(given: str | Recipe) -> Model:
    if isinstance(given, str):
        name, pattern = split_alias(given)
        given = Recipe(pattern, name)
    start, init = find_preset(given.pattern), ""
    if start is None and _is_model(given.pattern):
        start, init = initial_config(given.pattern), given.pattern
    if start is None:
        pattern = canonical_pattern(given.pattern)
        own_width = "d_model" in given.model
        return Model(pattern, given.name or pattern, given.model, given.train, own_width)
    settings = dataclasses.asdict(start)
    del settings["pattern"], settings["vocab_size"]  # the vocabulary is the task's
    name = given.name or (Path(init).name if init else given.pattern)
    return Model(start.pattern, name, {**settings, **given.model}, given.train, True, init)


def _is_model(text: str) -> bool:
    return Path(text).is_dir() and (find_model(text) / CONFIG).is_file()
