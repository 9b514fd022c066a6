"""Run a table or figure of a paper: train what is missing of it, and write the table.

NAME is that of a file in recipes/PAPER/tables, such as h3/table_12, or the path of a file of your
own; without a name, all are listed with their cost. Every row is trained from several seeds; the
table shows the mean and the standard deviation over them, beside the paper's figures. The same
command continues where it stopped, and tables share the runs that they have in common.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentParser

from stateline.cli.recipe import SUFFIXES, model_of_recipe, read_yaml
from stateline.cli.record import command_line
from stateline.devices import add_device_option
from stateline.errors import InputError, unknown_name

if TYPE_CHECKING:
    import torch

    from stateline.compare import Recipe
    from stateline.papers.record import TableRecord
    from stateline.papers.table import Table
    from stateline.runs.results import Results

RECORDS = Path("benchmarks/papers")
"""Where ``--record`` puts tables, as ``PAPER/NAME-SIZE.json``."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    option = parser.add_argument
    option("name", nargs="?", type=str, help="a table, such as h3/table_12; by default, list all")
    option(
        "--size",
        type=Literal["laptop", "paper"],
        default="laptop",
        help="the size of models and training: one for two cores, or that of the paper",
    )
    option("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of the runs of each row")
    option("--data", type=str, default="data", help="folder in place of the recipes' data")
    option("--out", type=str, default="runs/papers", help="folder for the runs of all tables")
    option("--jobs", type=int | None, default=None, help="runs at a time; by default one per core")
    option(
        "--from",
        nargs="+",
        type=str,
        default=[],
        help="folders with finished runs of stateline train or compare, which are taken over",
    )
    option("--as_is", action="store_true", help="train nothing: show the runs that are there")
    option(
        "--record",
        action="store_true",
        help=f"also keep the table in {RECORDS}, from which the papers' pages are made",
    )
    option("--recipes", type=str, default="recipes", help="folder of the recipes")
    add_device_option(parser)


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """List the tables, or run one."""
    given = parser.parse_args(arguments)

    from stateline.devices import resolve_device

    device = resolve_device(given.device)
    if given.name is None:
        _list_tables(Path(given.recipes))
        return 0
    name, table = find_table(given.name, Path(given.recipes))
    if given.size not in table.sizes:
        raise InputError(f"{name} has no size {given.size}: take --size {next(iter(table.sizes))}")
    if not given.seeds or min(given.seeds) < 0 or len(set(given.seeds)) < len(given.seeds):
        raise InputError(f"seeds must be different numbers from 0 on, got {given.seeds}")
    _reproduce(name, table, given, device)
    return 0


def find_table(name: str, recipes: Path) -> tuple[str, "Table"]:
    """A table by its name, or by the path of its file.

    Raises:
        InputError: If there is none of that name, or its file cannot be used.
    """
    from stateline.papers.table import find_tables, make_table

    if name.endswith(SUFFIXES):
        path, name = Path(name), Path(name).stem
    elif (found := find_tables(recipes).get(name)) is not None:
        path = found
    else:
        raise unknown_name("table", name, find_tables(recipes))
    return name, make_table(read_yaml(str(path), "table"), path)


def row_of_recipe(recipes: Path, name: str) -> tuple["Recipe", str | None]:
    """The model and the task of a recipe that a row names."""
    return model_of_recipe(str(recipes / f"{name}.yaml"), name)


def _reproduce(name: str, table: "Table", given: Any, device: "torch.device") -> None:
    from msgspec.structs import replace
    from rich.console import Console

    from stateline.cli.progress import show_news
    from stateline.compare.pool import Local, worker_devices
    from stateline.papers.plan import plan_table
    from stateline.papers.record import record_table
    from stateline.papers.run import keep_runs, matching_runs, run_jobs, stored_runs
    from stateline.reports import check_report
    from stateline.runs.store import outline

    size, out, console = given.size, Path(given.out), Console()
    seeds = [str(seed) for seed in given.seeds]
    command = command_line("reproduce", [given.name, "--size", size, "--seeds", *seeds])
    if needs := table.sizes[size].needs:
        console.print(f"data: {needs}", markup=False, highlight=False, soft_wrap=True)
    read = partial(row_of_recipe, Path(given.recipes))
    jobs, tasks = plan_table(table, size, given.seeds, given.data, read)
    check_report(out / name / size / "report.html")
    done = stored_runs(jobs, out)
    missing = [job for job in jobs if job not in done]
    taken = matching_runs(missing, [Path(other) for other in given["from"]])
    if given["from"]:
        console.print(f"runs taken over: {len(taken)}", highlight=False)
    done |= taken
    if not given.as_is:
        engine = Local(worker_devices(given.device, given.jobs), device)
        with show_news(console) as news:
            done = run_jobs(jobs, tasks, out, done, engine, news)
    if not done:
        raise InputError(f"no run of {name} is there yet: leave out --as_is")
    runs = [replace(done[job], model=job.label) for job in jobs if job in done]
    results = replace(outline(jobs, tasks, command), runs=runs, finished=len(runs) == len(jobs))
    record = record_table(name, table, size, results)
    keep_runs(taken, out)
    _write(table, record, results, given)


def _write(table: "Table", record: "TableRecord", results: "Results", given: Any) -> None:
    """Write and print a table, with its runs as a page and as charts."""
    from stateline.charts.export import write_charts
    from stateline.cli.console import wide_console
    from stateline.papers.chart import draw
    from stateline.papers.record import FILE, write_table
    from stateline.papers.show import print_table
    from stateline.reports import write_report
    from stateline.runs.store import write_results

    folder, console = Path(given.out) / record.table / record.size, wide_console()
    write_table(folder / FILE, record)
    write_results(folder, results)
    write_report(results, folder / "report.html")
    charts = draw(table, record, results)
    write_charts(charts, folder, ["svg", "csv"])
    if given.record:
        write_table(RECORDS / f"{record.table}-{record.size}.json", record)
    console.print(f"{table.paper}, {table.place}: {table.claim}", markup=False, soft_wrap=True)
    print_table(record, console)
    drawn = "".join(f"    chart: {folder / chart.name}.svg" for chart in charts)
    where = f"table: {folder / FILE}    report: {folder / 'report.html'}{drawn}"
    console.print(where, markup=False, highlight=False, soft_wrap=True)


def _list_tables(recipes: Path) -> None:
    from rich.console import Console

    from stateline.papers.table import find_tables

    console = Console()
    for name in find_tables(recipes):
        _, table = find_table(name, recipes)
        said = f"{name}: {table.place}. {table.claim}"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
        for size, settings in table.sizes.items():
            count = len(table.rows_of(size))
            said = f"  --size {size}: {count} rows; {settings.cost}"
            console.print(said, markup=False, highlight=False, soft_wrap=True)
