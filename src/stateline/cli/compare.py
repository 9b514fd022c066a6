"""Compare architectures side by side: same size, same tasks, one table and one report.

Every pattern is trained on every task at the number of parameters that the first pattern has,
scored at and beyond the training length, and at the end timed alone. Started again, it goes on
where it stopped.
"""

import shlex
from collections.abc import Sequence

from jsonargparse import ArgumentParser

WIDTH = 120
"""Columns of the table where there is no terminal to ask."""

TASKS = ("associative_recall", "copying", "text")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "patterns", nargs="+", type=str, help='architectures, for example "h3*2" "attention h3"'
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        type=str,
        default=list(TASKS),
        help='for example copying "text(path=books)"; "copying*3" trains from three seeds',
    )
    parser.add_argument("--out", type=str, default="runs/compare", help="folder for all results")
    parser.add_argument(
        "--d_model",
        type=int,
        default=64,
        help="width of the first pattern; others match its size",
    )
    parser.add_argument(
        "--parameters", type=int | None, default=None, help="number of parameters to match instead"
    )
    parser.add_argument("--steps", type=int | None, default=None, help="instead of the task's own")
    parser.add_argument("--lr", type=float | None, default=None, help="instead of the task's own")
    parser.add_argument(
        "--workers", type=int | None, default=None, help="runs at a time; by default one per core"
    )


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Compare, print the table, write the report."""
    given = parser.parse_args(arguments)

    from pathlib import Path

    from rich.console import Console

    from stateline.cli.progress import show_news
    from stateline.compare import Comparison, compare
    from stateline.reports import print_results, write_report

    comparison = Comparison(
        patterns=given.patterns,
        tasks=given.tasks,
        d_model=given.d_model,
        parameters=given.parameters,
        steps=given.steps,
        lr=given.lr,
    )
    console, folder = Console(), Path(given.out)
    if not console.is_terminal:
        console.width = WIDTH
    command = shlex.join(["stateline", "compare", *arguments])
    with show_news(console) as news:
        results = compare(comparison, folder, command=command, workers=given.workers, news=news)
    print_results(results, console)
    write_report(results, folder / "report.html")
    where = f"\nreport: {folder / 'report.html'}    data: {folder / 'results.json'}"
    console.print(where, markup=False, soft_wrap=True)
    return 0
