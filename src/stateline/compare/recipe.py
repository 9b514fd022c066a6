"""The models of a comparison: patterns, presets, folders of models, and recipes."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stateline.errors import InputError, check_choice
from stateline.files import read_yaml
from stateline.generate.runs import find_model, read_model_config
from stateline.models.checkpoint import CONFIG
from stateline.models.config import ModelConfig
from stateline.models.presets import find_preset
from stateline.pattern import canonical_pattern
from stateline.plugins import import_code
from stateline.runs.initial import settings_of
from stateline.settings import check_keywords
from stateline.train.config import TrainConfig

OF_A_RECIPE = ("pattern", "init", "task", "out", "model", "train")
"""Settings that a recipe may have, besides the code to import."""

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
        init: Folder of a model whose weights its runs start from; without a pattern, also with its
            layers. :func:`read_models` sets it where the pattern is a folder.
    """

    pattern: str
    name: str = ""
    model: Mapping[str, Any] = field(default_factory=dict, hash=False)
    train: Mapping[str, Any] = field(default_factory=dict, hash=False)
    init: str = ""

    @property
    def own_width(self) -> bool:
        """Whether it keeps its width unless the comparison asks for a size."""
        return "d_model" in self.model


def split_alias(text: str) -> tuple[str, str]:
    """Split ``name=pattern``; the name is empty if there is none.

    Example:
        >>> split_alias("rope=attention(position=rope)*2"), split_alias("attention(position=rope)")
        (('rope', 'attention(position=rope)*2'), ('', 'attention(position=rope)'))
    """
    found = _ALIAS.fullmatch(text.strip())
    return (found["name"].strip(), found["rest"].strip()) if found else ("", text)


def read_models(given: Sequence[str | Recipe]) -> list[Recipe]:
    """The models that texts and recipes describe: each has a name, a pattern and its settings.

    Raises:
        InputError: If a pattern is malformed, a folder holds no model to start from, or two
            different models have one name.
    """
    known: dict[str, Recipe] = {}
    for model in map(_read_model, given):
        if known.setdefault(model.name, model) != model:
            raise InputError(
                f"two different models are called {model.name!r}: name them, as in "
                f"'first={model.name}'"
            )
    return list(known.values())


def read_recipe(path: str | Path, name: str = "") -> tuple[Recipe, str | None]:
    """The model that a recipe file of ``stateline train`` describes, and its task if it names one.

    Args:
        path: The file.
        name: Name of the model in results; by default the name of the file.

    Raises:
        InputError: If the recipe cannot be read or used.
    """
    content, where = read_yaml(path, "recipe"), f"the recipe {path}"
    if content is not None and not isinstance(content, dict):
        raise InputError(f"{where} must be a mapping of settings, got {content!r:.40}")
    given = {key: value for key, value in (content or {}).items() if value is not None}
    for spec in given.pop("import", ()):
        import_code(spec)
    for key, value in given.items():
        check_choice(f"setting in {where}", key, OF_A_RECIPE)
        kind, words = (dict, "a mapping") if key in ("model", "train") else (str, "text")
        if not isinstance(value, kind):
            raise InputError(f"{key} in {where} must be {words}, got {value!r:.40}")
    init, pattern = given.get("init", ""), given.get("pattern", "")
    if not (init or pattern):
        raise InputError(f"{where} names no pattern: add a line such as pattern: h3*2")
    model, train = given.get("model", {}), given.get("train", {})
    settings = {key: value for key, value in model.items() if key != "pooling"}
    fixed = ("pattern", "vocab_size")
    check_keywords(f"the model in {where}", ModelConfig, settings, without=fixed)
    check_keywords(f"the training in {where}", TrainConfig, train)
    return Recipe(pattern, name or Path(path).stem, model, train, init), given.get("task")


def _read_model(given: str | Recipe) -> Recipe:
    if isinstance(given, str):
        name, pattern = split_alias(given)
        given = Recipe(pattern, name)
    if not given.init and _is_model(given.pattern):
        given = replace(given, pattern="", init=given.pattern)
    init, pattern = given.init, given.pattern
    preset = find_preset(pattern)
    if (start := read_model_config(init) if init else preset) is None:
        pattern = canonical_pattern(pattern)
        return replace(given, pattern=pattern, name=given.name or pattern)
    layers = preset.pattern if preset else canonical_pattern(pattern) if pattern else start.pattern
    name = given.name or pattern or Path(init).name
    return Recipe(layers, name, {**settings_of(start), **given.model}, given.train, init)


def _is_model(text: str) -> bool:
    return os.path.isdir(text) and (find_model(text) / CONFIG).is_file()
