"""Every recipe in recipes/ can be read, and its model can be built."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from stateline.cli import Parser
from stateline.cli import recipe as train
from stateline.cli.train import add_arguments
from stateline.compare import recipe as compare
from stateline.models.config import ModelConfig
from stateline.models.sequence_head import ClassifierConfig
from stateline.models.size import count_parameters
from stateline.pattern import parse_pattern
from stateline.tasks import TASKS, RowsTask
from stateline.train.config import TrainConfig

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = sorted(
    path.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("*.yaml")
    if path.parent.name != "tables"
)


_counted: dict[str, int] = {}


def parameters(config: ModelConfig) -> int:
    """Parameters of a model, built once for all recipes that differ in their training alone."""
    key = repr(config)
    if key not in _counted:
        _counted[key] = count_parameters(config)
    return _counted[key]


def test_there_are_recipes() -> None:
    assert RECIPES


def check(pattern: str, spec: str, model: dict[str, Any], train: dict[str, Any]) -> None:
    """The task is known, and the model and its training can be configured."""
    (task,) = parse_pattern(spec)
    kind, settings = TASKS[task.name], dict(model)
    assert set(task.keywords) <= set(signature(kind).parameters)
    pooling = settings.pop("pooling", None)
    if issubclass(kind, RowsTask):
        given_pooling = {} if pooling is None else {"pooling": pooling}
        config: ModelConfig = ClassifierConfig(pattern, 256, **settings, **given_pooling)
    else:
        assert pooling is None
        config = ModelConfig(pattern, 256, **settings)
    assert parameters(config) > 0
    assert TrainConfig(**train)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_compared(name: str) -> None:
    recipe, task = compare.read_recipe(FOLDER / name)
    (model,) = compare.read_models([recipe])
    check(model.pattern, task or "text", dict(model.model), dict(model.train))


FIRST = {name.rpartition("/")[0]: name for name in reversed(RECIPES)}
"""The first recipe of each folder."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FIRST.values() else pytest.mark.slow)
        for name in RECIPES
    ],
)
def test_a_recipe_can_be_trained(name: str) -> None:
    parser = Parser()
    add_arguments(parser)
    given = train.read_recipe([str(FOLDER / name)], parser)
    check(given.pattern, given.task, given.model.as_dict(), given.train.as_dict())


def test_every_recipe_says_what_it_is() -> None:
    assert [name for name in RECIPES if not (FOLDER / name).read_text().startswith("# ")] == []
