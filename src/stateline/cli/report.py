"""Show the results of comparisons and training runs side by side: one table and one report.

Results of the same task on the same data are joined; models of the same pattern from different
runs keep separate names. The report is one self-contained HTML file. With --export, its charts are
also written as files: PNG and SVG for papers, CSV with the numbers, JSON for Vega-Lite.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stateline.cli.console import wide_console
from stateline.cli.options import add_budget
from stateline.cli.parser import Parser
from stateline.files import check_writable

OUT = "runs/report"


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.argument("runs", "folders written by compare or train", nargs="+")
    about = f"folder for the report; default: the folder of the run, or {OUT} for several runs"
    parser.option("out", str, None, about)
    add_budget(parser)
    parser.option("export", str, None, "folder for the charts as files")
    formats = ["png", "svg", "csv", "json"]
    kind = list[Literal["png", "svg", "csv", "json"]]
    parser.option("format", kind, formats, "formats of these files")


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Print the table, write the report."""
    given = parser.parse_args(arguments)

    from stateline import reports
    from stateline.reports.budgets import read_budget

    budgets = [*map(read_budget, given.budget)]
    if given.export is not None:
        check_writable(Path(given.export) / "chart")
    folders = [Path(name) for name in given.runs]
    names = reports.folder_names(folders)
    results = [reports.read_results(folder) for folder in folders]
    merged = results[0]
    if len(results) > 1:
        merged = reports.merge(dict(zip(names, results, strict=True)))
    folder = Path(given.out or (folders[0] if len(folders) == 1 else OUT))
    console, page = wide_console(), folder / "report.html"
    reports.write_report(merged, page, budgets)
    reports.print_results(merged, console, budgets)
    said = f"report: {page}"
    if given.export is not None:
        files = reports.export_charts(merged, Path(given.export), given.format)
        said += f"    charts: {len(files)} files in {given.export}"
    console.print(f"\n{said}", soft_wrap=True)
    return 0
