"""Probe what models retrieve from their context: look up, copy, answer questions.

MODEL is the folder of a trained run, a folder with published weights, or hf:FOLDER for any causal
language model that the package transformers reads. Scores are written after each length, and a
second start measures only what is missing.
"""

import shlex
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from stateline.devices import add_device_option, add_dtype_option
from stateline.errors import InputError

OUT = "runs/probes"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    option = parser.add_argument
    option("models", nargs="+", type=str, help="folders of models; hf:FOLDER for transformers")
    option(
        "--tasks",
        nargs="+",
        type=str,
        default=["letters"],
        help="phone_book, copy, shuffled_copy, letters or squad",
    )
    option("--data", type=str | None, default=None, help="folder with names/, text/ and qa/")
    option("--tokenizer", type=str | None, default=None, help="instead of the models' own")
    option(
        "--lengths", nargs="+", type=int, default=[], help="lengths for all tasks; default by task"
    )
    option("--batches", type=int, default=10, help="batches per length, for the spread")
    option("--examples", type=int, default=64, help="examples per batch")
    option("--rows", type=int, default=16, help="prompts that are read at a time")
    option("--seed", type=int, default=0, help="seed of the examples")
    option("--out", type=str, default=OUT, help="folder for probes.json and the page")
    add_device_option(parser)
    add_dtype_option(parser)


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Measure, print the table and write the page."""
    given = parser.parse_args(arguments)

    from functools import partial

    from rich.console import Console

    from stateline.devices import resolve_device, resolve_dtype
    from stateline.files import user_path
    from stateline.hf_check import HUGGING_FACE
    from stateline.probe import Material, Plan, Settings, load_reader, run_probes
    from stateline.reports import check_report
    from stateline.reports.probes import point_line, print_probes, write_probes
    from stateline.runs.folder import check_imports

    device, dtype = resolve_device(given.device), resolve_dtype(given.dtype)
    settings = Settings(given.batches, given.examples, given.rows, given.seed)
    plan = Plan(given.models, given.tasks, given.lengths, settings, given.tokenizer)
    for model in given.models:
        home = user_path(model.removeprefix(HUGGING_FACE), "model")
        if not home.exists():
            raise InputError(f"no model in {home}: give a folder with config.json")
        if not model.startswith(HUGGING_FACE):
            check_imports(home)
    console, folder = Console(), user_path(given.out, "folder to write")
    check_report(folder / "probes.html")
    load = partial(load_reader, tokenizer=given.tokenizer, device=device, dtype=dtype)
    results = run_probes(
        plan,
        Material(given.data),
        load,
        folder,
        command=shlex.join(["stateline", "probe", *arguments]),
        on_point=lambda point, measured: print(point_line(point, measured=measured), flush=True),
    )
    print_probes(results, console)
    write_probes(results, folder / "probes.html")
    console.print(f"\npage: {folder / 'probes.html'}", markup=False, soft_wrap=True)
    return 0
