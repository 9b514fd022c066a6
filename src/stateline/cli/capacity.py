"""Show how much a state can hold: its bits, the strings it could copy, the bits a model needs.

MODEL is a pattern, a preset, or the folder of a trained run. The state of a trained run is rounded
to fewer and fewer bits (or noise is added) to measure how many it needs.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser

from stateline.cli.console import plain_table
from stateline.cli.info import given_settings, resolve
from stateline.devices import add_device_option, add_dtype_option
from stateline.models.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from stateline.layers.base import AnyLayer
    from stateline.models.language_model import LanguageModel
    from stateline.tasks import Task

LENGTHS = (16, 64, 256, 1024, 4096, 16384, 65536)

RUN_OPTIONS = ("task", "length", "batches", "noise")
"""Options for the folder of a trained run."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    option = parser.add_argument
    option("model", type=str, help="layers, as in h3*2, a preset, or the folder of a trained run")
    option("--n_letters", type=int, default=26, help="size of the alphabet of the strings")
    option(
        "--task", type=str | None, default=None, help="task to measure a run on; default its own"
    )
    option(
        "--length", type=int | None, default=None, help="length to measure at; default as trained"
    )
    option("--batches", type=int | None, default=None, help="batches per score; 4 by default")
    option("--noise", type=bool | None, default=None, help="add noise instead of rounding")
    add_device_option(parser)
    add_dtype_option(parser)
    parser.add_class_arguments(ModelConfig, skip={"pattern", "vocab_size", "layers"})


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print the tables."""
    options = parser.parse_args(arguments).as_dict()

    from rich.console import Console

    from stateline.devices import resolve_device, resolve_dtype
    from stateline.errors import InputError

    if options["n_letters"] < 2:
        raise InputError(f"n_letters must be at least 2, got {options['n_letters']}")
    device, dtype = resolve_device(options["device"]), resolve_dtype(options["dtype"])
    if os.path.isdir(options["model"]):
        model, measured = _trained(options, device, dtype)
    else:
        _check_pattern(options)
        given = given_settings(arguments, parser, options)
        model, measured = _untrained(options, given, dtype), []
    console = Console()
    console.print(f"{model.config.pattern}  d_model {model.d_model}", markup=False)
    for table, verdict in [*_bound(model, options["n_letters"]), *measured]:
        console.print()
        console.print(table)
        if verdict:
            console.print(verdict)
    return 0


def _trained(
    options: Mapping[str, Any], device: "torch.device", dtype: "torch.dtype | None"
) -> tuple["LanguageModel", list[tuple["Table", str]]]:
    from pathlib import Path

    from stateline.generate import load_run
    from stateline.runs.folder import check_imports

    check_imports(Path(options["model"]))
    model = load_run(options["model"])[0].to(device=device, dtype=dtype)
    task = _task(options["model"], options["task"])
    return model, [_measured(model, task, options)] if task else []


def _untrained(
    options: Mapping[str, Any], given: Mapping[str, Any], dtype: "torch.dtype | None"
) -> "LanguageModel":
    from stateline.models.factory import meta_model
    from stateline.models.language_model import LanguageModel

    vocab_size = options["n_letters"] + 4  # the letters and the marks of the copying task
    model = meta_model(resolve(options["model"], {**given, "vocab_size": vocab_size}))
    assert isinstance(model, LanguageModel)
    return model if dtype is None else model.to(dtype)


def _check_pattern(options: Mapping[str, Any]) -> None:
    """Raise InputError if options for a run were given, or MODEL looks like a missing folder."""
    from stateline.errors import InputError

    if "/" in options["model"]:
        raise InputError(f"MODEL must be a pattern or an existing folder, got {options['model']!r}")
    if given := [f"--{name}" for name in RUN_OPTIONS if options[name] is not None]:
        raise InputError(
            f"{', '.join(given)} can be given only for the folder of a trained run, not for the "
            f"pattern {options['model']!r}"
        )


def _task(folder: str, named: str | None) -> "Task | None":
    """The named task, or else the task of the run if it is answered by decoding."""
    from pathlib import Path

    from stateline.capacity import answered_by_decoding
    from stateline.runs.evaluate import task_of_run

    _, task = task_of_run(Path(folder), named)
    return task if named or answered_by_decoding(task) else None


def _bound(model: "LanguageModel", n_letters: int) -> list[tuple["Table", str]]:
    """Tables of the bits of each layer's state after BOS, a string and SEP, and of the bound."""
    import math

    from stateline.capacity import copy_error, longest_copy, state_bits
    from stateline.layers.compose import title
    from stateline.reports.format import DASH, short_number

    def size(part: "AnyLayer", length: int) -> str:
        within = model.max_len is None or length + 2 <= model.max_len
        return short_number(state_bits(part, length + 2)) if within else DASH

    parts = {f"{n:>2} {title(part)}": part for n, part in enumerate(model.stack.links)}
    lengths = [f"{length:,}" for length in LENGTHS]
    bits = plain_table("bits of state after", *lengths, left=1)
    for name, part in {**parts, "   all": model}.items():
        bits.add_row(name, *(size(part, n) for n in LENGTHS))

    bound = plain_table(f"strings of {n_letters} letters", *lengths, left=1)
    bound.add_row("bits of a string", *(short_number(n * math.log2(n_letters)) for n in LENGTHS))
    errors = [copy_error(model, n, n_letters) for n in LENGTHS]
    bound.add_row("copying fails in at least", *(f"{error:.3g}" for error in errors))

    longest = longest_copy(model, n_letters)
    verdict = (
        "The state grows as fast as the string: the bound excludes no length."
        if longest is None
        else f"Longest string that always fits: {longest:,} letters."
    )
    return [(bits, ""), (bound, verdict)]


def _measured(
    model: "LanguageModel", task: "Task", options: Mapping[str, Any]
) -> tuple["Table", str]:
    """Table of scores by bits per state entry of a trained model, and what follows."""
    import math

    from stateline.capacity import measure
    from stateline.errors import InputError
    from stateline.reports.format import count, short_number, words

    if task.vocab_size > model.config.vocab_size:
        raise InputError(
            f"the task has {task.vocab_size} tokens and the model {model.config.vocab_size}: "
            "name the task that it was trained on"
        )
    length = task.train_length if options["length"] is None else options["length"]
    batches = 4 if options["batches"] is None else options["batches"]
    noise = bool(options["noise"])
    found = measure(model, task, length, batches=batches, noise=noise)
    heading = f"{words(task.metric)} at {length}" + (", with noise" if noise else "")
    table = plain_table("bits per entry", "bits of state", heading, left=1)

    def total(bits: int) -> str:
        remaining = math.log2(2**bits + 1) if noise else bits  # see blur_state
        return short_number(remaining * found.numbers)

    for bits, score in found.by_bits.items():
        table.add_row(str(bits), total(bits), f"{score:.3f}")
    table.add_row("exact state", "", f"{found.whole:.3f}")
    if found.needed is None:
        return table, "No number of bits tried suffices."
    if noise:
        return table, f"The score survives noise that leaves at most {total(found.needed)} bits."
    if found.needed == 0:
        return table, "The score is the same without the state: the model does not use it."
    each = count(found.needed, "bit")
    suffice = "suffices" if found.needed == 1 else "suffice"
    needed = f"{total(found.needed)} bits in {found.numbers:,} entries"
    return table, f"{each} per state entry {suffice}: {needed}."
