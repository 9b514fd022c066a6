"""The result of a table: every value of every seed, with the paper's values."""

import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import field

from stateline.capacity import recalled_bits
from stateline.errors import InputError
from stateline.files import regular_file, write_text
from stateline.papers.table import Column, Size, Table, TableRow, row_name
from stateline.runs.record import Record
from stateline.runs.results import Results, RunRecord, TaskRecord, to_json
from stateline.tasks import make_task

FORMAT = "stateline-table-1"

FILE = "table.json"


class Spread(NamedTuple):
    """The mean of some values, and their standard deviation (0 for a single value)."""

    mean: float
    deviation: float


class RecordedRow(Record, frozen=True, kw_only=True):
    """One row of a table that was run.

    Attributes:
        label: Its name.
        seeds: The seeds of its runs.
        values: By column, a value per seed; ``None`` where the training diverged, or the score was
            never reached.
        paper: By column, the paper's value; ``None`` where it gives none.
        x: The row's position on the x axis of a figure.
        parameters: Parameters of the model; ``None`` if not recorded.
        updates: Updates of the longest run.
        seconds: Seconds of all runs; ``None`` if not recorded.
        curves: For each seed, the score by update; only of tables that are drawn over updates.
    """

    label: str
    seeds: list[int]
    values: list[list[float | None]]
    paper: list[float | None] = field(default_factory=list)
    x: float | None = None
    parameters: int | None = None
    updates: int | None = None
    seconds: float | None = None
    curves: list[dict[int, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The label, with the number of a figure's axis."""
        return row_name(self.label, self.x)

    def spread(self, column: int) -> Spread | None:
        """Mean and deviation over the seeds; ``None`` unless every seed has a value."""
        found = [value for value in self.values[column] if value is not None]
        if not found or len(found) < len(self.seeds):
            return None
        return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0)


class TableRecord(Record, frozen=True, kw_only=True):
    """A table that was run.

    Attributes:
        table: Its name, ``PAPER/NAME``; empty if ``reproduce`` did not make it.
        size: ``laptop`` or ``paper``.
        command: How to run it again; several commands if the rows were run by several.
        created: The day of the last run, ISO 8601.
        environment: Versions, machine and device of the first run, and the commits of all runs. A
            commit ends with ``+`` if files of the library differed from it; ``unknown`` stands for
            older runs without one.
        columns: Headings.
        rows: The rows that are complete.
        solved: By heading, the value from which a seed has solved the task, where some seeds do and
            others do not.
        lower: Headings of which lower values are better: errors, losses and updates.
        unit: What a value of a row is of: a seed, or an example, which is answered or not.
        note: What differs from what the command does today.
        format: :data:`FORMAT`.
    """

    table: str
    size: Size
    command: str
    created: str
    environment: dict[str, Any]
    columns: list[str]
    rows: list[RecordedRow]
    solved: dict[str, float] = field(default_factory=dict)
    lower: list[str] = field(default_factory=list)
    unit: Literal["seeds", "examples"] = "seeds"
    note: str = ""
    format: str = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"the format must be {FORMAT!r}, got {self.format!r:.60}")
        for row in self.rows:
            if len(row.values) != len(self.columns):
                raise ValueError(f"the row {row.label!r} must have {len(self.columns)} columns")
            if any(len(values) != len(row.seeds) for values in row.values):
                raise ValueError(f"the row {row.label!r} must have a figure for each seed")
            if row.curves and len(row.curves) != len(row.seeds):
                raise ValueError(f"the row {row.label!r} must have a curve for each seed, or none")

    def solves(self, heading: str, value: float | None) -> bool:
        """Whether a value is as good as that of a seed that has solved the task."""
        if value is None:
            return False
        goal = self.solved[heading]
        return value <= goal if heading in self.lower else value >= goal


def measure(column: Column, run: RunRecord, task: TaskRecord) -> float | None:
    """The value of a run in a column; ``None`` if there is none."""
    if column.count == "recalled_bits":
        return _recalled(run, task)
    if column.count in ("needed_bits", "kept_bits"):
        if run.capacity is None or run.capacity.needed is None:
            return None
        return run.capacity.needed * (run.capacity.numbers if column.count == "kept_bits" else 1)
    if column.count:
        return getattr(run, column.count)
    if column.updates_to is not None:
        side = 1.0 if task.higher_is_better else -1.0
        seen = (p for p in run.curve if p.metric is not None)
        goal = side * column.updates_to
        return next((p.step for p in seen if side * float(p.metric or 0.0) >= goal), None)
    if column.after is not None:
        value = next((p.metric for p in run.curve if p.step == column.after), None)
    else:
        value = _final(column, run, task)
    if value is None or column.form == "plain":
        return value
    return 100 * (1 - value) if column.form == "error" else 100 * value


def _recalled(run: RunRecord, task: TaskRecord) -> float:
    """The most bits, over all lengths, that the copied strings prove."""
    letters = make_task(task.spec).copied_letters
    scores = ((length, own[task.metric]) for length, own in run.by_length.items())
    return max(recalled_bits(score or 0.0, length, letters) for length, score in scores)


def _lower(column: Column, tasks: Iterable[TaskRecord]) -> bool:
    """Whether lower values of a column are better: an error, a count, or a loss."""
    if column.form == "error" or column.count or column.updates_to is not None:
        return True
    return column.form == "plain" and not any(task.higher_is_better for task in tasks)


def _final(column: Column, run: RunRecord, task: TaskRecord) -> float | None:
    length = task.train_length if column.at is None else column.at
    scores, name = run.by_length[length], column.score or task.metric
    if name not in scores and scores[task.metric] is not None:
        raise InputError(
            f"{run.task} has no score {name!r}, which a column asks for: score must be one of "
            f"{', '.join(scores)}"
        )
    return scores.get(name)


def record_table(name: str, table: Table, size: Size, results: Results) -> TableRecord:
    """A table from runs, whose models are named after its rows; rows without runs are left out."""
    columns, tasks = table.columns_of(size), {task.spec: task for task in results.tasks}
    runs: dict[str, list[RunRecord]] = {}
    for run in results.runs:
        runs.setdefault(run.model, []).append(run)
    return TableRecord(
        table=name,
        size=size,
        command=results.command,
        created=datetime.now(UTC).date().isoformat(),
        environment=_environment(results),
        columns=[column.heading for column in columns],
        rows=[
            _row(row, columns, own, tasks[own[0].task], curves=table.plot == "updates")
            for row in table.rows_of(size)
            if (own := runs.get(row.name))
        ],
        solved={c.heading: c.solved for c in columns if c.solved is not None},
        lower=[c.heading for c in columns if _lower(c, tasks.values())],
    )


def with_rows(record: TableRecord, fresh: TableRecord) -> TableRecord:
    """A record with newer rows: each replaces the row of its name, or adds its seeds to that row.

    Seeds are added if the recorded row has none of them, and as many parameters and updates.

    Args:
        record: The record.
        fresh: The same table, or some of its rows, of other runs. The result has the day and the
            environment of ``fresh``, and the commits and commands of both.
    """
    if record.columns != fresh.columns:
        raise InputError(
            f"the record has the columns {', '.join(record.columns)}, but the table now has "
            f"{', '.join(fresh.columns)}: record all rows again, without --rows"
        )
    rows = {row.name: row for row in record.rows}
    rows |= {row.name: _with_seeds(rows.get(row.name), row) for row in fresh.rows}
    both = (own.environment.get("commit", "unknown") for own in (record, fresh))
    commits = sorted({commit for own in both for commit in str(own).split(", ")})
    commands = dict.fromkeys([*record.command.split("; "), fresh.command])
    return msgspec.structs.replace(
        record,
        command="; ".join(commands),
        created=fresh.created,
        environment=fresh.environment | {"commit": ", ".join(commits)},
        rows=[*rows.values()],
        solved=fresh.solved,
        lower=fresh.lower,
    )


def _with_seeds(old: RecordedRow | None, new: RecordedRow) -> RecordedRow:
    """The newer row, with the values of the older one if only their seeds differ."""
    if old is None or {*old.seeds} & {*new.seeds}:
        return new
    if (old.parameters, old.updates) != (new.parameters, new.updates):
        return new
    seeds, taken = [*old.seeds, *new.seeds], (old.seconds, new.seconds)
    order = sorted(range(len(seeds)), key=seeds.__getitem__)
    both = ([*a, *b] for a, b in zip(old.values, new.values, strict=True))
    curves = [*old.curves, *new.curves] if old.curves and new.curves else []
    return msgspec.structs.replace(
        new,
        seeds=[seeds[place] for place in order],
        values=[[values[place] for place in order] for values in both],
        seconds=None if None in taken else round(sum(filter(None, taken)), 1),
        curves=[curves[place] for place in order] if curves else [],
    )


def _environment(results: Results) -> dict[str, Any]:
    found = results.runs[0].environment if results.runs else results.environment
    commits = {str(own) for run in results.runs if (own := run.environment.get("commit"))}
    return found | ({"commit": ", ".join(sorted(commits))} if commits else {})


def _row(
    row: TableRow,
    columns: Sequence[Column],
    runs: Sequence[RunRecord],
    task: TaskRecord,
    *,
    curves: bool,
) -> RecordedRow:
    return RecordedRow(
        label=row.label,
        x=row.x,
        seeds=[run.seed for run in runs],
        values=[[measure(column, run, task) for run in runs] for column in columns],
        paper=[*row.paper, *[None] * (len(columns) - len(row.paper))],
        parameters=runs[0].parameters,
        updates=max(run.steps for run in runs),
        seconds=round(sum(run.seconds for run in runs), 1),
        curves=[_curve(run) for run in runs] if curves else [],
    )


def _curve(run: RunRecord) -> dict[int, float]:
    return {point.step: point.metric for point in run.curve if point.metric is not None}


def write_table(path: Path, record: TableRecord) -> None:
    """Write a record as JSON."""
    write_text(path, to_json(record, indent=1))


def read_table(path: Path) -> TableRecord:
    """Read a record."""
    try:
        return msgspec.json.decode(regular_file(path, "table").read_bytes(), type=TableRecord)
    except msgspec.MsgspecError as error:
        raise InputError(f"{path} is not a recorded table: {error}; record it again") from error
