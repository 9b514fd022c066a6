"""Every table of a paper can be read, and each of its rows can be trained."""

from collections.abc import Iterator
from functools import cache
from inspect import signature
from pathlib import Path

import pytest

from stateline.compare import Recipe
from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.sequence_head import ClassifierConfig
from stateline.models.size import count_parameters
from stateline.papers.plan import check_columns, resolve
from stateline.papers.record import measure
from stateline.papers.table import Column, Table, TableRow, find_table, find_tables, make_table
from stateline.pattern import parse_pattern
from stateline.runs.results import CapacityRecord, CurvePoint, RunRecord, TaskRecord
from stateline.tasks import TASKS, GeneratedTask, LabelledTask, RowsTask, Task, make_task
from stateline.train.config import TrainConfig

RECIPES = Path(__file__).parents[2] / "recipes"
TABLES = find_tables(RECIPES)


made_task = cache(make_task)


def resolved(name: str) -> Iterator[tuple[TableRow, list[Column], Recipe, str]]:
    """Every row of a table at each size, with its columns, its model and its task."""
    _, table = find_table(name, RECIPES)
    for size in table.sizes:
        for row in table.rows_of(size):
            yield row, table.columns_of(size), *resolve(row, table, size, RECIPES)


def config(recipe: Recipe, kind: type[Task]) -> ModelConfig:
    made = ClassifierConfig if issubclass(kind, RowsTask) else ModelConfig
    return made(recipe.pattern, 256, **recipe.model)


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_a_table_has_sound_settings_and_the_scores_of_its_columns(name: str) -> None:
    for row, columns, recipe, spec in resolved(name):
        (task,) = parse_pattern(spec)
        kind = TASKS[task.name]
        assert set(task.keywords) <= set(signature(kind).parameters)
        assert config(recipe, kind)
        training = TrainConfig(**{**kind.training, **recipe.train})
        if issubclass(kind, GeneratedTask | LabelledTask):  # others read files
            check_columns(row, columns, training, made_task(spec))


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_the_model_of_every_row_can_be_built(name: str) -> None:
    for row, _, recipe, spec in resolved(name):
        if row.pattern or row.model:  # tests/test_recipes.py builds those of the recipes
            assert count_parameters(config(recipe, TASKS[parse_pattern(spec)[0].name])) > 0


def test_no_figure_of_a_paper_stands_beside_a_model_of_another_size() -> None:
    beside = {
        name
        for name in TABLES
        if "laptop" in (table := find_table(name, RECIPES)[1]).sizes
        and any(figure is not None for row in table.rows_of("laptop") for figure in row.paper)
    }
    assert beside == {"h3/table_2", "h3/table_2_plain", "h3/table_12"}  # the paper's own size


def test_a_row_overrides_its_size_and_a_size_overrides_the_recipe(
    tmp_path: Path,
) -> None:
    table = make_table(
        {
            **{"paper": "p", "place": "table 1", "claim": "c", "columns": [{}]},
            "rows": [{"label": "a", "recipe": "x/{size}", "train": {"lr": 3.0}}],
            "sizes": {"laptop": {"cost": "", "train": {"lr": 2.0, "steps": 5}}},
        },
        Path("t.yaml"),
    )
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "laptop.yaml").write_text(
        "{pattern: h3, task: copying( max_len = 3 ), train: {lr: 1e-3, log_every: 20}}"
    )
    recipe, task = resolve(table.rows[0], table, "laptop", tmp_path)
    assert (recipe.pattern, recipe.name) == ("h3", "a")
    assert task == "copying(max_len=3)"
    assert recipe.train["lr"] == 3.0
    assert recipe.train["steps"] == 5
    assert recipe.train["log_every"] == 20


SOUND = {
    **{"paper": "p", "place": "table 1", "claim": "c", "columns": [{}]},
    "rows": [{"label": "a", "pattern": "h3"}],
    "sizes": {"laptop": {"cost": "a minute"}},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"place": 1}, "Expected `str`, got `int` - at `$.place`"),
        ({"placee": "x"}, "unknown field `placee`"),
        ({"columns": [{"at": 3, "after": 4}]}, "one of at (with score), after, updates_to"),
        ({"columns": []}, "has no rows or no columns"),
        ({"rows": [{"label": "a"}]}, "names neither a recipe nor a pattern"),
        ({"rows": SOUND["rows"] * 2}, "the same label and x"),
        ({"rows": [{"label": "a", "pattern": "h3", "paper": [1, 2]}]}, "more figures than columns"),
        ({"plot": "x"}, "plot is x, but a row"),
        ({"sizes": {}}, "sizes must have"),
        ({"sizes": {"huge": {"cost": ""}}}, "huge"),
    ],
)
def test_a_broken_table_is_refused_in_words(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        make_table({**SOUND, **changes}, Path("t.yaml"))
    assert message in str(error.value)
    assert str(error.value).startswith("the table t.yaml: ")


def test_a_column_measures_what_it_says() -> None:
    task = TaskRecord(
        **{"spec": "t", "name": "t", "title": "t", "about": "", "metric": "accuracy"},
        **{"higher_is_better": True, "solved_at": None, "train_length": 4},
        **{"eval_lengths": [4, 8], "data": {}, "baselines": {}},
    )
    run = RunRecord(
        **{"model": "m", "task": "t", "seed": 0, "d_model": 8, "parameters": 70},
        **{"parameters_wanted": 70, "steps": 30, "stopped": "finished", "seconds": 2.5},
        **{"tokens_per_second": 1.0, "steps_to_solve": None},
        curve=[
            CurvePoint(step=step, loss=1.0, metric=metric)
            for step, metric in ((10, 0.25), (15, None), (20, 0.5), (30, 0.75))
        ],
        by_length={4: {"accuracy": 0.75, "other": 3.0}, 8: {"accuracy": 0.5}},
    )
    measured = {
        Column(): 0.75,
        Column(at=8, form="percent"): 50.0,
        Column(at=8, form="error"): 50.0,
        Column(form="error"): 25.0,
        Column(score="other"): 3.0,
        Column(after=20): 0.5,
        Column(after=21): None,
        Column(updates_to=0.5): 20,
        Column(updates_to=0.8): None,
        Column(count="parameters"): 70,
        Column(count="needed_bits"): None,
        Column(count="kept_bits"): None,
    }
    for column, wanted in measured.items():
        assert measure(column, run, task) == wanted, column
    with pytest.raises(InputError, match="no score 'x', which a column asks for"):
        measure(Column(score="x"), run, task)


def test_bits_of_a_state_are_those_that_copies_prove_and_those_that_are_kept() -> None:
    task = TaskRecord(
        **{"spec": "copying(max_len=4, n_letters=2)", "name": "copying", "title": "", "about": ""},
        **{"metric": "string_accuracy", "higher_is_better": True, "solved_at": 0.95},
        **{"train_length": 4, "eval_lengths": [4, 8, 16], "data": {}, "baselines": {}},
    )
    run = RunRecord(
        **{"model": "m", "task": task.spec, "seed": 0, "d_model": 8, "parameters": 70},
        **{"parameters_wanted": 70, "steps": 30, "stopped": "finished", "seconds": 2.5},
        **{"tokens_per_second": 1.0, "steps_to_solve": None, "curve": []},
        by_length={n: {"string_accuracy": own} for n, own in ((4, 1.0), (8, 0.125), (16, 0.0))},
        capacity=CapacityRecord(numbers=30, needed=2, by_bits={2: 1.0}),
    )
    assert measure(Column(count="recalled_bits"), run, task) == 5  # of 8 letters, an eighth
    assert measure(Column(count="kept_bits"), run, task) == 60


@pytest.mark.parametrize(
    "task", ["induction_head", "copying(mixed=true)", "copying(metric=character_accuracy)"]
)
def test_only_copies_of_whole_strings_prove_bits(task: str) -> None:
    row = make_table(SOUND, Path("t.yaml")).rows_of("laptop")[0]
    with pytest.raises(InputError, match="row 'a' has no recalled_bits: they are of copying"):
        check_columns(row, [Column(count="recalled_bits")], TrainConfig(), make_task(task))


def test_a_task_that_improves_downwards_reaches_its_goal_from_above() -> None:
    task = TaskRecord(
        **{"spec": "t", "name": "t", "title": "t", "about": "", "metric": "bits"},
        **{"higher_is_better": False, "solved_at": None, "train_length": 4},
        **{"eval_lengths": [4], "data": {}, "baselines": {}},
    )
    run = RunRecord(
        **{"model": "m", "task": "t", "seed": 0, "d_model": 8, "parameters": 70},
        **{"parameters_wanted": 70, "steps": 30, "stopped": "finished", "seconds": 2.5},
        **{"tokens_per_second": 1.0, "steps_to_solve": None},
        curve=[CurvePoint(step=s, loss=1.0, metric=m) for s, m in ((10, 8.0), (20, 2.0))],
        by_length={4: {"bits": 2.0}},
    )
    assert measure(Column(updates_to=3.0), run, task) == 20


def test_rows_have_the_names_of_their_labels_and_places() -> None:
    assert TableRow(label="a", pattern="h3", x=0.5).name == "a, 0.5"
    assert isinstance(find_table("h3/table_12", RECIPES)[1], Table)
