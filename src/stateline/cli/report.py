"""Show the results of comparisons and training runs side by side: one table and one report.

Results of the same task on the same data are joined; models of the same pattern from different
runs keep separate names. The report is one self-contained HTML file. With --export, its charts are
also written as files: PNG and SVG for papers, CSV with the numbers, JSON for Vega-Lite.
"""

from collections.abc import Sequence
from typing import Literal

from jsonargparse import ArgumentParser

from stateline.cli.budget import add_budget_option, read_budgets
from stateline.cli.console import wide_console

OUT = "runs/report"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("runs", nargs="+", type=str, help="folders written by compare or train")
    parser.add_argument(
        "--out",
        type=str | None,
        default=None,
        help=f"folder for the report; default: the folder of the run, or {OUT} for several runs",
    )
    add_budget_option(parser)
    parser.add_argument(
        "--export", type=str | None, default=None, help="folder for the charts as files"
    )
    parser.add_argument(
        "--format",
        nargs="+",
        type=Literal["png", "svg", "csv", "json"],
        default=["png", "svg", "csv", "json"],
        help="formats of these files",
    )


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print the table, write the report."""
    given = parser.parse_args(arguments)

    from pathlib import Path

    from stateline.files import check_writable
    from stateline.reports import (
        export_charts,
        folder_names,
        merge,
        print_results,
        read_results,
        write_report,
    )

    budgets = read_budgets(given.budget)
    if given.export is not None:
        check_writable(Path(given.export) / "chart")
    folders = [Path(name) for name in given.runs]
    names = folder_names(folders)
    results = [read_results(folder) for folder in folders]
    merged = merge(dict(zip(names, results, strict=True))) if len(results) > 1 else results[0]
    console = wide_console()
    folder = Path(given.out or (folders[0] if len(folders) == 1 else OUT))
    write_report(merged, folder / "report.html", budgets)
    print_results(merged, console, budgets)
    said = [f"report: {folder / 'report.html'}"]
    if given.export is not None:
        files = export_charts(merged, Path(given.export), given.format)
        said.append(f"charts: {len(files)} files in {given.export}")
    console.print("\n" + "    ".join(said), markup=False, soft_wrap=True)
    return 0
