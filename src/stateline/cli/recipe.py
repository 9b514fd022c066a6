"""Reading a training recipe: a YAML file of settings, which the command line overrides."""

import argparse
import glob
import os
from collections.abc import Collection, Sequence
from typing import Any, Literal

from jsonargparse import Namespace

from stateline.cli.parser import Parser
from stateline.errors import InputError
from stateline.files import read_yaml
from stateline.models.config import ModelConfig
from stateline.models.presets import find_preset
from stateline.train.config import TrainConfig

SUFFIXES = (".yaml", ".yml")


def add_settings(parser: Parser, without: Collection[str] = ()) -> None:
    """Add all settings of a model but its pattern and vocabulary, and of its training."""
    parser.add_class_arguments(ModelConfig, "model", skip={"pattern", "vocab_size", *without})
    about = "what a classifier pools; by default the mean of all positions"
    parser.option("model.pooling", Literal["mean", "last"], None, about)
    parser.add_class_arguments(TrainConfig, "train", skip={*without})


def without_defaults(parser: Parser) -> None:
    """Leave settings of models and training out of the parsed arguments if they were not given."""
    for action in parser._actions:
        if action.dest.startswith(("model.", "train.")):
            action.default = argparse.SUPPRESS


def read_recipe(arguments: Sequence[str], parser: Parser) -> Any:
    """The settings of a recipe; the command line overrides them.

    A preset in place of a pattern, or the model whose weights the run starts from (``init``), sets
    the defaults of the model's settings.
    """
    parser.default_config_files = []  # not those of an earlier call
    given = parser.parse_args(arguments)
    init, pattern = None, given.pattern
    if given.recipe.endswith(SUFFIXES):
        given = _read_file(given.recipe, arguments, parser)
    elif given.init is not None:
        raise InputError(
            f"--init goes with a YAML file, got RECIPE {given.recipe}: give the folder "
            f"{given.init} as RECIPE, or leave out --init"
        )
    elif os.path.isdir(given.recipe):
        init = given.recipe
    elif pattern is not None:
        raise InputError(
            "--pattern replaces the pattern of a recipe file or of the model in a folder, got "
            f"RECIPE {given.recipe}: give one of the two"
        )
    elif "/" in given.recipe.partition("(")[0]:
        raise InputError(
            "RECIPE must be a pattern, a preset, a YAML file (.yaml, .yml) or an existing folder, "
            f"got {given.recipe!r}"
        )
    else:
        given.pattern = given.recipe
    from stateline.generate.runs import read_model_config
    from stateline.runs.initial import settings_of

    init = init or given.init
    if (start := read_model_config(init) if init else find_preset(given.pattern)) is not None:
        layers = given.pattern if init else None
        settings = settings_of(start)
        parser.set_defaults({f"model.{name}": value for name, value in settings.items()})
        given = parser.parse_args(arguments)
        given.pattern, given.init = layers or start.pattern, init
    return given


def _read_file(path: str, arguments: Sequence[str], parser: Parser) -> Any:
    """The settings of a file; the command line overrides them."""
    read_yaml(path, "recipe")
    parser.default_config_files = [glob.escape(path)]
    try:
        given = parser.parse_args(arguments)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the recipe {path}: {error}") from error
    for section in ("model", "train"):
        if not isinstance(found := given.get(section, Namespace()), Namespace):
            raise InputError(f"{section} in the recipe {path} must be a mapping, got {found!r}")
    if given.pattern is None and given.init is not None:
        given.pattern = ""
    if given.pattern is None:
        raise InputError(f"the recipe {path} names no pattern: add a line such as pattern: h3*2")
    for name in ("pattern", "task", "out"):
        if not isinstance(given[name], str):
            raise InputError(f"{name} in the recipe {path} must be text, got {given[name]!r}")
    return given
