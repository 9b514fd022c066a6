"""Every recipe in recipes/ can be read, and its model can be built."""

from inspect import signature
from pathlib import Path

import pytest

from stateline.cli import Parser
from stateline.cli.train import add_arguments, read_recipe
from stateline.models.classifier import ClassifierConfig
from stateline.models.config import ModelConfig
from stateline.models.pattern import parse_pattern
from stateline.models.size import count_parameters
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


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_trained(name: str) -> None:
    parser = Parser(print_config=None)
    add_arguments(parser)
    given = read_recipe([str(FOLDER / name)], parser)
    (task,) = parse_pattern(given.task)
    assert task.name in TASKS
    kind, settings = TASKS[task.name], given.model.as_dict()
    assert set(task.keywords) <= set(signature(kind).parameters)
    pooling = settings.pop("pooling")
    if issubclass(kind, RowsTask):
        given_pooling = {} if pooling is None else {"pooling": pooling}
        config: ModelConfig = ClassifierConfig(given.pattern, 256, **settings, **given_pooling)
    else:
        assert pooling is None
        config = ModelConfig(given.pattern, 256, **settings)
    assert parameters(config) > 0
    assert TrainConfig(**given.train.as_dict())


def test_every_recipe_says_what_it_is() -> None:
    assert [name for name in RECIPES if not (FOLDER / name).read_text().startswith("# ")] == []
