"""Run a table or figure of a paper: train its missing runs, and write the table.

NAME is a file in recipes/PAPER/tables, such as h3/table_12, or the path of a file of your
own; without a name, all are listed with their cost. Every row is trained from several seeds; the
table shows the mean and the standard deviation over them, beside the paper's values. The same
command continues where it stopped, and tables share the runs that they have in common.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stateline.cli.console import begin, wide_console
from stateline.cli.options import add_device
from stateline.cli.parser import Parser
from stateline.errors import InputError
from stateline.files import check_writable
from stateline.reports.format import count

if TYPE_CHECKING:
    from stateline.papers.record import TableRecord
    from stateline.papers.reproduce import Reproduced

RECORDS = Path("benchmarks/papers")
"""Where ``--record`` puts tables, as ``PAPER/NAME-SIZE.json``."""

_MINUTES = re.compile(
    r"(?:about )?(?P<least>a|[\d.]+)(?: to (?P<most>[\d.]+))? minutes? of an? (?:idle )?core "
    r"per (?P<unit>run|seed)\b"
)


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.argument("name", "a table, such as h3/table_12; by default, list all", nargs="?")
    option, switch = parser.option, parser.switch
    about = "size of models and training: a small one for two cores, or the paper's"
    option("size", Literal["laptop", "paper"], "laptop", about)
    option("seeds", list[int], [0, 1, 2], "numbers of the seeds of each row, not how many")
    option("rows", list[str], [], "names of rows; by default all")
    option("data", str, "data", "folder in place of the recipes' data")
    option("out", str, "runs/papers", "folder for the runs of all tables")
    option("workers", int, None, "runs at a time; by default one per core")
    about = "folders with finished runs of stateline train or compare, which are reused"
    option("from", list[str], [], about)
    switch("as_is", "train nothing: show the existing runs")
    about = (
        f"also keep the table in {RECORDS}, from which the papers' pages are made; with --rows, "
    )
    switch("record", about + "these rows replace rows of the record, or add other seeds to them")
    about = f"train again in OUT/verify, and compare each value with the table in {RECORDS}"
    switch("verify", about)
    option("recipes", str, None, "folder of the recipes; by default Stateline's own")
    add_device(parser)


def run(arguments: Sequence[str], parser: Parser) -> int:
    """List the tables, or run one."""
    given = parser.parse_args(arguments)
    if given.name is not None:
        seeds = ", ".join(map(str, given.seeds))
        begin(f"reproducing {given.name} with the seeds {seeds}: results go to {given.out}")

    from rich.console import Console

    from stateline.cli.progress import show_news
    from stateline.compare.pool import local
    from stateline.papers.record import read_table, with_rows, write_table
    from stateline.papers.reproduce import reproduce
    from stateline.papers.table import RECIPES, find_table
    from stateline.reports import write_report

    recipes = Path(given.recipes or RECIPES)
    if given.name is None:
        _list_tables(recipes, len(given.seeds))
        return 0
    if given.record and given.verify:
        raise InputError("--record replaces figures, --verify compares with them: take one of both")
    engine = local(given.device, given.workers)
    name, _ = find_table(given.name, recipes)
    recorded = RECORDS / f"{name}-{given.size}.json"
    if given.verify and not recorded.exists():
        raise InputError(f"nothing to verify: {recorded} is missing; --record writes it")
    record = read_table(recorded) if given.verify else None
    folder = Path(given.out) / "verify" if given.verify else Path(given.out)
    check_writable(folder / name / given.size / "report.html")
    with show_news(Console(markup=False)) as news:
        found = reproduce(
            given.name,
            size=given.size,
            seeds=given.seeds,
            rows=given.rows,
            recipes=recipes,
            data=given.data,
            folder=folder,
            taken_from=given["from"],
            train=not given.as_is,
            engine=engine,
            news=news,
            tell=print,
        )
    write_report(found.results, found.folder / "report.html")
    if given.record:
        partly = given.rows and recorded.exists()
        write_table(
            recorded, with_rows(read_table(recorded), found.record) if partly else found.record
        )
    _show(found)
    return 0 if record is None else _verify(record, found.record)


def _verify(record: "TableRecord", fresh: "TableRecord") -> int:
    """Print how new values agree with the recorded ones; 1 if one is outside their spread."""
    from rich import box
    from rich.table import Table as Grid

    from stateline.papers.show import NONE, number
    from stateline.papers.verify import power, verify

    verified = verify(record, fresh)
    grid = Grid("row", "column", "recorded", "seed", "now", "", box=box.SIMPLE_HEAD)
    for row, column, recorded, seed, now, agreement in verified:
        shown = NONE if now is None else number(now)
        grid.add_row(row, column, recorded, str(seed), shown, agreement)
    console = wide_console()
    console.print(grid)
    outside = sum(own.agreement == "outside" for own in verified)
    console.print(f"{outside} of {len(verified)} figures are outside the spread of the record.")
    if (seeds := min(len(row.seeds) for row in record.rows)) > 1:
        found = f"{power(5.0, seeds):.0%}"
        console.print(f"A mean 5 deviations off is found in {found} of cases ({seeds} seeds).")
    return 1 if outside else 0


def _show(found: "Reproduced") -> None:
    """Print a table, and where its files are."""
    from stateline.papers.record import FILE
    from stateline.papers.show import print_table

    console, table, folder = wide_console(), found.table, found.folder
    console.print(f"{table.paper}, {table.place}: {table.claim}", soft_wrap=True)
    print_table(found.record, console)
    drawn = "".join(f"    chart: {folder / chart.name}.svg" for chart in found.charts)
    where = f"table: {folder / FILE}    report: {folder / 'report.html'}{drawn}"
    console.print(where, highlight=False, soft_wrap=True)


def _list_tables(recipes: Path, seeds: int) -> None:
    """Print every table with what it costs, as wide as the terminal."""
    from rich.padding import Padding
    from rich.text import Text

    from stateline.papers.table import find_table, find_tables

    console = wide_console()
    for name in find_tables(recipes):
        _, table = find_table(name, recipes)
        console.print(Text(f"{name}: {table.place}. {table.claim}"))
        for size, settings in table.sizes.items():
            rows = len(table.rows_of(size))
            said = f"--size {size}: {rows} rows; {settings.cost}"
            said += _in_all(settings.cost, rows, seeds)
            console.print(Padding(Text(said), (0, 0, 0, 2), expand=False))


def _in_all(cost: str, rows: int, seeds: int) -> str:
    """The cost of a whole table, if ``cost`` begins with minutes per run or per seed.

    Example:
        >>> _in_all("3 to 7 minutes of a core per run", rows=10, seeds=3)
        '; in all, with 3 seeds, 90 to 210 minutes of a core'
    """
    found = _MINUTES.match(cost)
    if found is None:
        return ""
    times = seeds * (rows if found["unit"] == "run" else 1)
    ends = [end for end in (found["least"], found["most"]) if end]
    told = " to ".join(f"{times * (1.0 if end == 'a' else float(end)):g}" for end in ends)
    return f"; in all, with {count(seeds, 'seed')}, {told} minutes of a core"
