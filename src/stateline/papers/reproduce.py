"""Run a table or figure of a paper: train its missing runs, and store the result."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from stateline.charts.chart import Chart
from stateline.charts.export import write_charts
from stateline.compare.engine import Engine
from stateline.compare.news import News
from stateline.compare.pool import local
from stateline.errors import InputError
from stateline.files import sole_writer
from stateline.papers.chart import draw
from stateline.papers.plan import plan_table
from stateline.papers.record import FILE, TableRecord, record_table, write_table
from stateline.papers.run import keep_runs, matching_runs, run_jobs, stored_runs
from stateline.papers.table import RECIPES, Size, Table, find_table
from stateline.plugins import command_line
from stateline.runs.results import Results
from stateline.runs.store import outline, write_results


class Reproduced(NamedTuple):
    """The result of a table, and the folder of its files."""

    table: Table
    record: TableRecord
    results: Results
    charts: list[Chart]
    folder: Path


def reproduce(  # noqa: PLR0913
    name: str,
    *,
    size: Size = "laptop",
    seeds: Sequence[int] = (0, 1, 2),
    rows: Sequence[str] = (),
    recipes: Path | str = RECIPES,
    data: str = "data",
    folder: Path | str = "runs/papers",
    taken_from: Sequence[Path | str] = (),
    train: bool = True,
    engine: Engine | None = None,
    news: News | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> Reproduced:
    """Train the missing runs of a table; write ``table.json``, with its runs and charts.

    The same call continues where it was stopped. Tables share the runs that they have in common.

    Args:
        name: The table, such as ``h3/table_12``, or the path of a file.
        size: ``laptop`` (for two cores) or ``paper``.
        seeds: Seeds of the runs of each row.
        rows: Names of the rows to run; by default all.
        recipes: Folder of the recipes; by default Stateline's own.
        data: Folder in place of the ``data`` of recipes.
        folder: Folder for the runs of all tables.
        taken_from: Folders with finished runs of other commands, which are reused.
        train: Whether to train missing runs; otherwise, only the existing runs are shown.
        engine: Where to train; by default in worker processes, as
            :func:`stateline.compare.compare` does.
        news: Called while jobs run.
        tell: Called with lines about the data and the reused runs.

    Raises:
        InputError: If the table, a recipe, a task or a device cannot be used, there is no run, or
            another process trains the same table.
    """
    name, table = find_table(name, Path(recipes))
    if size not in table.sizes:
        raise InputError(f"{name} has no size {size}: take --size {next(iter(table.sizes))}")
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise InputError(f"seeds must be different numbers of at least 0, got {[*seeds]}")
    if rows:
        table = table.of_rows(size, rows)
    if needs := table.sizes[size].needs:
        tell(f"data: {needs}")
    folder = Path(folder)
    jobs, tasks = plan_table(table, size, seeds, data, Path(recipes))
    done = stored_runs(jobs, folder)
    taken = matching_runs([job for job in jobs if job not in done], [*map(Path, taken_from)])
    if taken_from:
        tell(f"runs taken over: {len(taken)}")
    done |= taken
    own_folder = folder / name / size
    if train:
        with sole_writer(own_folder):  # otherwise two commands would train the same runs
            done = run_jobs(jobs, tasks, folder, done, engine or local(), news or News())
    if not done:
        raise InputError(f"no run of {name} is there yet: leave out --as_is")
    given = [name, "--size", size, "--seeds", *map(str, seeds)]
    given += ["--rows", *rows] if rows else []
    runs = [replace(done[job], model=job.label) for job in jobs if job in done]
    begun = outline(jobs, tasks, command_line("reproduce", given))
    results = replace(begun, runs=runs, finished=len(runs) == len(jobs))
    record = record_table(name, table, size, results)
    keep_runs(taken, folder)
    write_table(own_folder / FILE, record)
    write_results(own_folder, results)
    charts = draw(table, record)
    write_charts(charts, own_folder, ["svg", "csv"])
    return Reproduced(table, record, results, charts, own_folder)
