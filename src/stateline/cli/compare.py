"""Compare architectures side by side: same size, same tasks, one table and one report.

Every pattern is trained on every task at the number of parameters that the first pattern has,
scored at and beyond the training length, and timed at the end. Presets such as mamba-130m keep
their own width, unless --d_model or --parameters is given. The same command continues where it
stopped.
"""

from collections.abc import Sequence
from typing import Literal

from jsonargparse import ArgumentParser

from stateline.cli.record import command_line
from stateline.devices import add_device_option

WIDTH = 120
"""Columns of the table where the output is not a terminal."""

TASKS = ("associative_recall", "copying", "text")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "patterns",
        nargs="+",
        type=str,
        help='architectures or presets, for example "h3*2" "attention h3"',
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
        type=int | None,
        default=None,
        help="width of the first pattern, whose size the others match; by default 64",
    )
    parser.add_argument(
        "--parameters", type=int | None, default=None, help="number of parameters to match instead"
    )
    parser.add_argument(
        "--steps", type=int | None, default=None, help="training steps; by default the task's own"
    )
    parser.add_argument(
        "--lr", type=float | None, default=None, help="learning rate; by default the task's own"
    )
    parser.add_argument(
        "--precision",
        type=Literal["float32", "bfloat16"] | None,
        default=None,
        help="precision of training; by default the task's own, mostly float32",
    )
    add_device_option(parser)
    parser.add_argument(
        "--workers",
        type=int | None,
        default=None,
        help="models trained at a time, each in its own process; by default one per core, or one "
        "per GPU; 0 trains one after the other without worker processes",
    )


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Compare, print the table, write the report."""
    given = parser.parse_args(arguments)

    from pathlib import Path

    from rich.console import Console

    from stateline.cli.progress import show_news
    from stateline.compare import Comparison, compare
    from stateline.reports import check_report, print_results, write_report

    comparison = Comparison(
        patterns=given.patterns,
        tasks=given.tasks,
        d_model=given.d_model,
        parameters=given.parameters,
        steps=given.steps,
        lr=given.lr,
        precision=given.precision,
    )
    console, folder = Console(), Path(given.out)
    if not console.is_terminal:
        console.width = WIDTH
    check_report(folder / "report.html")
    command = command_line("compare", arguments)
    with show_news(console) as news:
        results = compare(
            comparison,
            folder,
            command=command,
            workers=given.workers,
            device=given.device,
            news=news,
        )
    print_results(results, console)
    write_report(results, folder / "report.html")
    where = f"\nreport: {folder / 'report.html'}    data: {folder / 'results.json'}"
    console.print(where, markup=False, soft_wrap=True)
    return 0
