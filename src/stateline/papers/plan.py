"""The jobs behind the rows of a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stateline.compare import Comparison, Job, Recipe, plan
from stateline.compare.recipe import read_recipe
from stateline.errors import InputError
from stateline.papers.table import Column, Size, Table, TableRow
from stateline.pattern import canonical_pattern, format_pattern, parse_pattern
from stateline.tasks import Task, make_task
from stateline.train.config import TrainConfig

HERE = "data/"
"""Beginning of paths of data in recipes."""


def plan_table(
    table: Table, size: Size, seeds: Sequence[int], data: str, recipes: Path
) -> tuple[list[Job], dict[str, Task]]:
    """The jobs of all rows by row and seed, named after their rows; and their tasks, with seed 0.

    The folder ``data`` stands in place of the ``data`` of recipes.
    """
    tasks: dict[str, Task] = {}
    jobs = []
    for row in table.rows_of(size):
        recipe, task = resolve(row, table, size, recipes)
        spec = with_data(task, data)
        if spec not in tasks:
            tasks[spec] = make_task(spec)
        one = Comparison([recipe], [spec], protocol="quick", seeds=max(seeds) + 1)
        planned = {job.training.seed: job for job in plan(one, tasks)}
        jobs += [planned[seed] for seed in seeds]
        check_columns(row, table.columns_of(size), jobs[-1].training, tasks[spec])
    return jobs, tasks


def check_columns(
    row: TableRow, columns: Sequence[Column], training: TrainConfig, task: Task
) -> None:
    """Check that the runs of a row will have the scores that the columns ask for."""
    every, steps = training.eval_every, training.steps
    for column in columns:
        if column.at is not None and column.at not in task.eval_lengths:
            lengths = ", ".join(map(str, task.eval_lengths))
            raise InputError(f"row {row.name!r} is scored at {lengths}, not at {column.at}")
        if column.score and (names := task.score_names()) and column.score not in names:
            known = ", ".join(sorted(names))
            raise InputError(f"row {row.name!r} has no score {column.score!r}, but {known}")
        if column.count == "recalled_bits" and not task.copied_letters:
            raise InputError(
                f"row {row.name!r} has no recalled_bits: they are of copying with string_accuracy, "
                "of one length per score (without mixed)"
            )
        after = column.after
        if after is not None and after != steps and (not every or after % every or after > steps):
            raise InputError(
                f"row {row.name!r} is scored every {every} of {steps} updates, so not after "
                f"{after}: change after or train.eval_every"
            )


def resolve(row: TableRow, table: Table, size: Size, recipes: Path) -> tuple[Recipe, str]:
    """The model of a row with all of its settings, and its task."""
    recipe, task = Recipe(row.pattern, row.name), None
    if row.recipe:
        name = row.recipe.replace("{size}", size)
        recipe, task = read_recipe(recipes / f"{name}.yaml", name)
    given = table.sizes[size]
    spec = row.task or given.task or task
    if spec is None:
        raise InputError(f"the row {row.name!r} has no task: add task to the row or to its size")
    model = _merged(recipe.model, given.model, row.model)
    train = _merged(recipe.train, given.train, row.train)
    own = Recipe(row.pattern or recipe.pattern, row.name, model, train, recipe.init)
    return own, canonical_pattern(spec)


def _merged(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merged settings; later ones override earlier ones, also inside nested mappings."""
    found: dict[str, Any] = {}
    for given in settings:
        for name, value in given.items():
            both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
            found[name] = _merged(found[name], value) if both else value
    return found


def with_data(task: str, data: str) -> str:
    """A task that reads its data from another folder than ``data``.

    Example:
        >>> with_data("tokens(path=data/books, length=64)", "/mnt")
        'tokens(path=/mnt/books, length=64)'
    """
    (item,) = parse_pattern(task)
    path = item.keywords.get("path")
    if isinstance(path, str) and path.startswith(HERE):
        moved = {**item.keywords, "path": f"{data.rstrip('/')}/{path.removeprefix(HERE)}"}
        item = item._replace(keywords=moved)
    return format_pattern((item,))
