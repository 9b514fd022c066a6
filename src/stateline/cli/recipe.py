"""Reading a training recipe: a YAML file of settings, under those of the command line."""

import dataclasses
import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from stateline.errors import InputError
from stateline.files import regular_file
from stateline.models.presets import find_preset

LARGEST, DEEPEST = 1 << 20, 16
"""Bytes, and levels of nesting, that a recipe may have."""


def read_recipe(arguments: Sequence[str], parser: ArgumentParser) -> Any:
    """The settings of a recipe, overridden by those of the command line.

    A preset in place of a pattern, or the model whose weights the run starts from (``init``), sets
    the defaults of the model's settings.

    Raises:
        InputError: If the recipe cannot be read or used.
    """
    given = parser.parse_args(arguments)
    init = None
    if given.recipe.endswith((".yaml", ".yml")):
        given = _read_file(given.recipe, arguments, parser)
    elif os.path.isdir(given.recipe):
        init, given.pattern = given.recipe, ""
    elif given.pattern is not None:
        raise InputError("--pattern replaces the pattern of a recipe file: give one of the two")
    else:
        given.pattern = given.recipe
    from stateline.runs.initial import initial_config

    init = init or given.init
    if (start := initial_config(init) if init else find_preset(given.pattern)) is not None:
        settings = dataclasses.asdict(start)
        del settings["pattern"], settings["vocab_size"]  # the vocabulary is the task's
        parser.set_defaults({f"model.{name}": value for name, value in settings.items()})
        given = parser.parse_args(arguments)
        given.pattern, given.init = start.pattern, init
    return given


def _read_file(path: str, arguments: Sequence[str], parser: ArgumentParser) -> Any:
    _check_content(path)
    parser.default_config_files = [glob.escape(path)]
    try:
        given = parser.parse_args(arguments)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the recipe {path}: {error}") from error
    for section in ("model", "train"):
        if not isinstance(given[section], Namespace):
            raise InputError(
                f"{section} in the recipe {path} must be a mapping, got {given[section]!r}"
            )
    if given.init is not None:
        given.pattern = ""
    if given.pattern is None:
        raise InputError(f"the recipe {path} names no pattern: add a line such as pattern: h3*2")
    for name in ("pattern", "task", "out"):
        if not isinstance(given[name], str):
            raise InputError(f"{name} in the recipe {path} must be text, got {given[name]!r}")
    return given


def _check_content(path: str) -> None:
    """Raise InputError unless a file is YAML of a sane size, without aliases, its keys text."""
    file = regular_file(path, "recipe")
    if file.stat().st_size > LARGEST:
        raise InputError(f"the recipe {path} must have at most {LARGEST:,} bytes")
    try:
        text = Path(file).read_text(encoding="utf-8")
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise InputError(f"the recipe {path} must not use YAML aliases: write it out")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise InputError(f"the recipe {path} must have at most {DEEPEST} nested levels")
        _check_keys(path, yaml.safe_load(text))
    except InputError:
        raise
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the recipe {path} is not valid YAML: {reason}") from error


def _check_keys(path: str, content: Any) -> None:
    if isinstance(content, dict):
        for key, value in content.items():
            if not isinstance(key, str):
                raise InputError(f"names in the recipe {path} must be text, got {key!r}")
            _check_keys(path, value)
    elif isinstance(content, list):
        for value in content:
            _check_keys(path, value)
