"""The file of a table or figure: its claim, its rows and its columns, at each size.

For example::

    paper: Fu et al. (2023)
    place: table 12
    claim: H3 trained on sequences of 20 tokens recalls at 40, too.
    sure: recalled
    columns:
      - {at: 20, form: percent}
      - {at: 40, form: percent}
    rows:
      - {label: H3, recipe: h3/paper/associative_recall_h3, paper: [99.8, 98.4]}
      - {label: no dropout, recipe: h3/extrapolation/no_dropout}
    sizes:
      laptop: {cost: 11 minutes of a core per run}

A row names a recipe below ``recipes/``, where ``{size}`` stands for the size, or a pattern and a
task. Settings of a size override the recipe, and settings of a row override both.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import field
from msgspec.structs import replace

from stateline.errors import InputError, check_choice, unknown_name
from stateline.files import read_yaml

Size = Literal["laptop", "paper"]

Sure = Literal["read", "recalled", "from a chart"]
"""How sure we are of a paper's values: read in its text, recalled from memory, or from a chart."""

Keywords = dict[str, Any]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a table's file."""


class Column(_Part, frozen=True, kw_only=True):
    """The measurement of a run; one of ``after``, ``updates_to`` and ``count``, or a final score.

    Attributes:
        at: Length of the final score, one that the task scores; by default the training length.
        score: Name of the score; by default the task's metric.
        after: Take the metric at the training length after this number of updates.
        updates_to: Count the updates until the metric at the training length is as good as this.
        count: Take ``parameters``, ``seconds`` (of the updates), ``needed_bits`` (per number of
            the state), ``kept_bits`` (of all numbers that a solved task needs) or
            ``recalled_bits`` (the most, over the lengths, that copies of whole strings prove).
        form: ``percent`` multiplies by 100; ``error`` is 100 times the distance to 1.
        solved: The value from which a seed has solved the task, at least or, of errors and losses,
            at most, where some seeds do and others do not; the result is then the share of seeds
            that do.
        title: Heading; by default made from the other fields.
    """

    at: int | None = None
    score: str = ""
    after: int | None = None
    updates_to: float | None = None
    count: Literal["", "parameters", "seconds", "needed_bits", "kept_bits", "recalled_bits"] = ""
    form: Literal["plain", "percent", "error"] = "plain"
    solved: float | None = None
    title: str = ""

    def __post_init__(self) -> None:
        kinds = (self.at is not None or self.score != "", self.after is not None)
        if sum((*kinds, self.updates_to is not None, self.count != "")) > 1:
            raise ValueError("a column has one of at (with score), after, updates_to and count")

    @property
    def heading(self) -> str:
        """The title, or what is measured in words."""
        score = (self.score or "score").replace("_", " ")
        if self.title:
            return self.title
        if self.count:
            return self.count.replace("_", " ")
        if self.updates_to is not None:
            return f"updates to {self.updates_to:g}"
        place = "" if self.at is None else f" at {self.at:,}"
        place = place if self.after is None else f" after {self.after:,} updates"
        return score + place + {"percent": " (%)", "error": " (% wrong)"}.get(self.form, "")


class TableRow(_Part, frozen=True, kw_only=True):
    """One model on one task.

    Attributes:
        label: Its name; rows of one label are one line of a figure over ``x``.
        recipe: A file below ``recipes/``, without its suffix; ``{size}`` stands for the size.
        pattern: The model; it overrides the model of the recipe.
        task: The task; it overrides the size and the recipe.
        x: The row's position on the x axis of a figure.
        model: Settings of its configuration.
        train: Settings of its training.
        paper: The paper's values, in the order of the columns; null where it gives none.
    """

    label: str
    recipe: str = ""
    pattern: str = ""
    task: str = ""
    x: float | None = None
    model: Keywords = field(default_factory=dict)
    train: Keywords = field(default_factory=dict)
    paper: list[float | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.recipe and not self.pattern:
            raise ValueError(f"the row {self.label!r} names neither a recipe nor a pattern")

    @property
    def name(self) -> str:
        """The label, with the number of a figure's axis."""
        return row_name(self.label, self.x)


def row_name(label: str, x: float | None) -> str:
    """The name of a row: its label, with its place on a figure's axis if it has one.

    Example:
        >>> row_name("Hard-ALiBi", 6)
        'Hard-ALiBi, 6'
    """
    return label if x is None else f"{label}, {x:g}"


class SizeSettings(_Part, frozen=True, kw_only=True):
    """Settings of one size.

    Attributes:
        cost: What a run costs, in words.
        needs: Which data to make first, as a command; empty if it needs none.
        rows: Rows in place of the table's.
        columns: Columns in place of the table's.
        task: The task of all rows; it overrides the recipes.
        model: Settings of all configurations.
        train: Settings of all trainings.
    """

    cost: str
    needs: str = ""
    rows: list[TableRow] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    task: str = ""
    model: Keywords = field(default_factory=dict)
    train: Keywords = field(default_factory=dict)


class Table(_Part, frozen=True, kw_only=True):
    """A table or figure of a paper.

    Attributes:
        paper: Authors and year.
        place: Where in the paper: ``table 12``.
        claim: What it shows in the paper, in a sentence.
        sure: How sure we are of the paper's values.
        columns: What is measured.
        rows: The models.
        sizes: The sizes at which it can be run.
        plot: What scores are drawn against: the ``length``, the ``updates``, or the ``x`` of rows.
        x_title: Title of that axis, if it is the ``x`` of rows.
    """

    paper: str
    place: str
    claim: str
    sizes: dict[Size, SizeSettings]
    sure: Sure = "recalled"
    columns: list[Column] = field(default_factory=list)
    rows: list[TableRow] = field(default_factory=list)
    plot: Literal["none", "length", "updates", "x"] = "none"
    x_title: str = ""

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError("sizes must have laptop, paper or both")
        for size in self.sizes:
            rows, columns = self.rows_of(size), self.columns_of(size)
            if not rows or not columns:
                raise ValueError(f"the size {size} has no rows or no columns")
            names = [row.name for row in rows]
            if len(set(names)) < len(names):
                raise ValueError(f"two rows of the size {size} have the same label and x")
            if any(len(row.paper) > len(columns) for row in rows):
                raise ValueError(f"a row of the size {size} has more figures than columns")
            if self.plot == "x" and any(row.x is None for row in rows):
                raise ValueError(f"plot is x, but a row of the size {size} has none")

    def rows_of(self, size: Size) -> list[TableRow]:
        """The rows at a size."""
        return self.sizes[size].rows or self.rows

    def of_rows(self, size: Size, names: Sequence[str]) -> "Table":
        """The table at a size with some of its rows."""
        rows = {row.name: row for row in self.rows_of(size)}
        for name in names:
            check_choice("row", name, rows)
            if names.count(name) > 1:
                raise InputError(f"the row {name!r} is given twice: name it once")
        own = replace(self.sizes[size], rows=[rows[name] for name in names])
        return replace(self, sizes={size: own})

    def columns_of(self, size: Size) -> list[Column]:
        """The columns at a size."""
        return self.sizes[size].columns or self.columns


RECIPES = Path(__file__).parents[1] / "recipes"
"""The recipes of Stateline; in its repository, a link to the folder ``recipes``."""


def find_tables(recipes: Path) -> dict[str, Path]:
    """The files of tables in a folder of recipes, by name: ``h3/table_12``."""
    files = {
        f"{path.parents[1].name}/{path.stem}": path for path in recipes.glob("*/tables/*.yaml")
    }
    if not files:
        raise InputError(f"no tables in {recipes}: leave out --recipes to take Stateline's own")
    return dict(sorted(files.items()))


def make_table(content: Mapping[str, Any], path: Path) -> Table:
    """The table that the content of a file describes."""
    try:
        return msgspec.convert(content, Table)
    except msgspec.ValidationError as error:
        raise InputError(f"the table {path}: {error}") from error


def find_table(name: str, recipes: Path) -> tuple[str, Table]:
    """The name and the content of a table, given its name or the path of its file."""
    if name.endswith((".yaml", ".yml")):
        path, name = Path(name), Path(name).stem
    elif (found := find_tables(recipes).get(name)) is not None:
        path = found
    else:
        raise unknown_name("table", name, find_tables(recipes))
    return name, make_table(read_yaml(path, "table"), path)
