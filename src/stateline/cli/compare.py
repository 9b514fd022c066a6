"""Compare architectures side by side: same size, same tasks, one table and one report.

Every model is trained on every task at the size of the first one, at a learning rate that is chosen
for it on validation data, from several seeds, scored at and beyond the training length, and timed
at the end. --protocol quick trains each once instead, at the task's own rate. The same command
continues where it stopped.

A model is a pattern, a preset such as mamba-130m, a training recipe (a YAML file), or the folder of
a model to start from; NAME=MODEL gives it a name. Presets, recipes with a width and folders keep
their width, unless --d_model or --parameters is given.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import Namespace

from stateline.cli import options
from stateline.cli.console import begin, wide_console
from stateline.cli.parser import Parser
from stateline.cli.recipe import SUFFIXES, add_settings, without_defaults
from stateline.errors import InputError, needed
from stateline.files import check_writable
from stateline.plugins import command_line

if TYPE_CHECKING:
    from rich.console import Console

    from stateline.compare import Comparison, News, Recipe

TASKS = ("associative_recall", "copying", "text")

_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    about = 'patterns, presets, recipes or folders, such as "h3*2" hybrid="attention h3"'
    parser.argument("patterns", about, nargs="+")
    option = parser.option
    option(
        "tasks",
        list[str],
        None,
        'for example copying "text(path=books, steps=500)", where training settings hold for '
        'one task; "copying*5" trains from five seeds; by default the tasks of recipes, else '
        f"{' '.join(TASKS)}",
    )
    option("out", str, "runs/compare", "folder or URL for all results")
    option("d_model", int, None, "width of the first model, which the others match; by default 64")
    option(
        "parameters",
        list[str],
        None,
        "number of parameters in place of --d_model, such as 300k; several: compare at each",
        metavar="N",
    )
    option(
        "match",
        Literal["parameters", "flops", "state", "none"],
        "parameters",
        "what the models of one size have in common: parameters, FLOPs per token, bytes of the "
        "state, or only the width",
    )
    about = "tokens at which FLOPs or states are equal; by default the training length"
    option("match_length", int, None, about)
    option(
        "protocol",
        Literal["sweep", "quick"],
        "sweep",
        "sweep: choose a learning rate for each model on validation data, then train from "
        "three seeds; quick: one rate, one seed",
    )
    about = "learning rates to try; by default the task's own, a third of it, and three times it"
    option("lrs", list[float], [], about)
    option(
        "muon_lrs",
        list[float],
        [],
        "learning rates to try for the matrices of --train.optimizer muon, combined with all "
        "--lrs; by default those around the task's own, unless --train.muon_lr is given",
    )
    option("weight_decays", list[float], [], "weight decays to try; by default the task's own")
    option(
        "seeds",
        int,
        None,
        "how many seeds the scored runs have; by default 1 with --protocol quick, 3 with "
        "--decide no, else as many as --decide needs",
    )
    parser.add_argument(
        "--decide",
        nargs="?",
        const="best",
        type=Literal["best", "order", "no"] | None,
        default=None,
        help="add seeds, from 3 to 6 or --seeds, until the best model of each task is told apart, "
        "or all models (order); by default best, but no with --protocol quick or with --seeds",
    )
    option("budget_minutes", float, None, "time after which --decide adds no seeds")
    about = "time after which training stops, with what is done; the same command goes on"
    option("minutes", float, None, about)
    parser.switch("dry_run", "show runs, memory and minutes, from a few updates of each model")
    option("steps", int, None, "training steps; by default the task's own")
    option("lr", float, None, "learning rate of all runs; no other is tried")
    option("precision", Literal["float32", "bfloat16"], None, "of training; by default the task's")
    add_settings(parser, without=("d_model", "seed"))
    without_defaults(parser)
    options.add_device(parser)
    options.add_engine(parser)
    options.add_tracker(parser)
    options.add_budget(parser)
    parser.switch("watch", "open the page in a browser, which reloads it while runs finish")
    about = "speeds to measure: a few, those at 256 to 65,536 tokens in 1 and 64 rows, or none"
    option("timing", Literal["short", "full", "none"], "short", about)


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Compare, print the table, write the report."""
    given = parser.parse_args(arguments)
    if given.engine != "local":
        package = "submitit" if given.engine == "slurm" else given.engine
        needed(package, f"the engine {given.engine}", given.engine)
    begin(f"comparing {', '.join(given.patterns)}: results go to {given.out}")

    from stateline.cli.progress import show_news
    from stateline.cli.watch import Watched
    from stateline.compare import compare
    from stateline.compare.news import together
    from stateline.compare.storage import results_folder
    from stateline.compare.trackers import tracked
    from stateline.reports import print_results, write_report
    from stateline.reports.budgets import read_budget

    comparison, console = _comparison(given), wide_console()
    if given.dry_run:
        _print_forecast(comparison, given.out, console)
        return 0
    observers: list[News] = [*tracked(given.tracker)]
    budgets = [*map(read_budget, given.budget)]
    with results_folder(given.out) as (folder, mirror):
        report = folder / "report.html"
        check_writable(report)
        observers += [mirror] if mirror else []
        observers += [Watched(folder, budgets)] if given.watch else []
        with show_news(console) as shown:
            results = compare(
                comparison,
                folder,
                command=command_line("compare", arguments),
                device=given.device,
                news=together([shown, *observers]),
                engine=options.make_engine(given, mirror),
                timing=given.timing,
            )
        print_results(results, console, budgets)
        write_report(results, report, budgets)
    if not results.finished:
        console.print(f"\n--minutes {given.minutes:g} are over: the same command goes on.")
    where = f"\nreport: {given.out}/report.html    data: {given.out}/results.json"
    console.print(where, soft_wrap=True)
    return 0


def _print_forecast(comparison: "Comparison", out: str, console: "Console") -> None:
    """Print what each model will cost on each task, and all of them together."""
    from rich import box
    from rich.table import Table as Grid

    from stateline.compare.forecast import forecast
    from stateline.reports.format import count, short_bytes, short_number
    from stateline.workers import cores

    found = forecast(comparison, Path(out))
    names = ("task", "model", "runs", "trials", "there", "memory", "minutes")
    grid = Grid(*names, box=box.SIMPLE_HEAD, show_edge=False)
    for own in found:
        counts = map(str, (own.runs, own.trials, own.done))
        costs = short_bytes(own.memory), short_number(own.seconds / 60)
        grid.add_row(own.task, own.model, *counts, *costs)
    console.print(grid)
    whole, trials = sum(own.runs for own in found), sum(own.trials for own in found)
    minutes = sum(own.seconds for own in found) / 60
    console.print(
        f"At most {count(whole, 'run')} and {count(trials, 'trial')}: updates of "
        f"{short_number(minutes)} minutes on one core, {short_number(minutes / cores())} on all "
        f"{cores()}; scoring comes on top. Runs that solve their task end sooner."
    )


def _comparison(given: Any) -> "Comparison":
    """What the options ask for."""
    from stateline.compare import Comparison
    from stateline.compare.recipe import read_recipe, split_alias

    models: list[str | Recipe] = []
    tasks: dict[str, None] = {}
    for text in given.patterns:
        name, rest = split_alias(text)
        if rest.endswith(SUFFIXES):
            recipe, task = read_recipe(rest, name)
            models.append(recipe)
            tasks.update({task: None} if task else {})
        else:
            models.append(text)
    found = {
        "patterns": models,
        "tasks": given.tasks or list(tasks) or TASKS,
        "parameters": None if given.parameters is None else [*map(_number, given.parameters)],
        "decide": given.decide or ("no" if given.seeds or given.protocol == "quick" else "best"),
        **{part: given.get(part, Namespace()).as_dict() for part in ("model", "train")},
    }
    others = {own.name: given[own.name] for own in fields(Comparison) if own.name not in found}
    return Comparison(**found, **others)


def _number(text: str) -> int:
    """A number of parameters.

    Example:
        >>> _number("300k"), _number("1.5m"), _number("250_000")
        (300000, 1500000, 250000)
    """
    digits, unit = text[:-1], _UNITS.get(text[-1:].lower())
    try:
        return int(text) if unit is None else round(float(digits) * unit)
    except (ValueError, OverflowError):
        raise InputError(
            f"parameters must be a number such as 250000, 300k or 1.5m, got {text!r:.40}"
        ) from None
