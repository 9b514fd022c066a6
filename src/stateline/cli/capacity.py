"""Show how much a state can hold: its bits, the strings it could copy, the bits a model needs.

MODEL is a pattern, a preset, a recipe, or the folder of a trained run. The state of a trained run
is rounded to fewer and fewer bits (or noise is added) to measure how many it needs.
"""

import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from stateline.cli.console import plain_table
from stateline.cli.info import given_settings, resolve
from stateline.cli.options import add_device_and_dtype, open_model, place
from stateline.cli.parser import Parser
from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.reports.format import DASH, count, short_number, words

if TYPE_CHECKING:
    from rich.table import Table

    from stateline.layers.base import AnyLayer
    from stateline.models.language_model import LanguageModel
    from stateline.tasks import Task

LENGTHS = (16, 64, 256, 1024, 4096, 16384, 65536)


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    about = "layers, as in h3*2, a preset, a recipe, or the folder of a trained run"
    parser.argument("model", about)
    option = parser.option
    option("n_letters", int, 26, "size of the alphabet of the strings")
    option("task", str, None, "task to measure a run on; default its own")
    option("length", int, None, "length to measure at; default as trained")
    option("batches", int, None, "batches per score; 4 by default")
    parser.switch("noise", "add noise instead of rounding")
    add_device_and_dtype(parser)
    parser.add_class_arguments(ModelConfig, skip={"pattern", "vocab_size", "layers"})


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Print the tables."""
    given = parser.parse_args(arguments)
    if given.n_letters < 2:
        raise InputError(f"n_letters must be at least 2, got {given.n_letters}")
    tables: list[tuple[Table, str]] = []
    if os.path.isdir(given.model):
        model, _ = open_model(given, given.model)
        if (task := _task(given.model, given.task)) is not None:
            tables = [_measured(model, task, given)]
        elif ignored := _run_options(given):
            raise InputError(
                f"{ignored} can be given only with a task that is answered by decoding; the task "
                f"of {given.model} is not: name another one, such as --task copying"
            )
    else:
        model = _untrained(given, arguments, parser)

    from rich.console import Console

    console = Console(markup=False)
    console.print(f"{model.config.pattern}  d_model {model.d_model}")
    for table, verdict in [*_bound(model, given.n_letters), *tables]:
        console.print()
        console.print(table)
        if verdict:
            console.print(verdict)
    return 0


def _untrained(given: Namespace, arguments: Sequence[str], parser: Parser) -> "LanguageModel":
    """The model of a pattern, a preset or a recipe, without weights."""
    from stateline.models.factory import meta_model
    from stateline.models.language_model import LanguageModel

    _, dtype = place(given)
    settings = given_settings(arguments, parser)
    settings["vocab_size"] = given.n_letters + 4  # the letters and the marks of the copying task
    model = meta_model(resolve(given.model, settings))
    if wrong := _run_options(given):
        raise InputError(
            f"{wrong} can be given only for the folder of a trained run, not for {given.model!r}"
        )
    assert isinstance(model, LanguageModel)
    return model.to(dtype)


def _run_options(given: Namespace) -> str:
    """The options for a trained run that were given."""
    names = ("task", "length", "batches", "noise")
    return ", ".join(f"--{name}" for name in names if given[name] not in (None, False))


def _task(folder: str, named: str | None) -> "Task | None":
    """The named task, or else the task of the run if it is answered by decoding."""
    from pathlib import Path

    from stateline.capacity import answered_by_decoding
    from stateline.runs.evaluate import task_of_run

    _, task = task_of_run(Path(folder), named)
    return task if named or answered_by_decoding(task) else None


def _bound(model: "LanguageModel", n_letters: int) -> "Iterator[tuple[Table, str]]":
    """Tables of the bits of each layer's state after BOS, a string and SEP, and of the bound."""
    from stateline.capacity import copy_error, longest_copy, state_bits
    from stateline.layers.compose import title

    def size(part: "AnyLayer", length: int) -> str:
        within = model.max_len is None or length + 2 <= model.max_len
        return short_number(state_bits(part, length + 2)) if within else DASH

    parts = {f"{n:>2} {title(part)}": part for n, part in enumerate(model.stack.links)}
    lengths = [f"{length:,}" for length in LENGTHS]
    bits = plain_table("bits of state after", *lengths, left=1)
    for name, part in {**parts, "   all": model}.items():
        bits.add_row(name, *(size(part, n) for n in LENGTHS))
    yield bits, ""

    bound = plain_table(f"strings of {n_letters} letters", *lengths, left=1)
    bound.add_row("bits of a string", *(short_number(n * math.log2(n_letters)) for n in LENGTHS))
    errors = [copy_error(model, n, n_letters) for n in LENGTHS]
    bound.add_row("copying fails in at least", *(f"{error:.3g}" for error in errors))
    longest = longest_copy(model, n_letters)
    yield (
        bound,
        "The state grows as fast as the string: the bound excludes no length."
        if longest is None
        else f"Longest string that always fits: {longest:,} letters.",
    )


def _measured(model: "LanguageModel", task: "Task", given: Namespace) -> "tuple[Table, str]":
    """Table of scores by bits per state entry of a trained model, and a sentence about them."""
    from stateline.capacity import TOLERANCE, measure

    if task.vocab_size > model.config.vocab_size:
        raise InputError(
            f"the task has {task.vocab_size} tokens and the model {model.config.vocab_size}: "
            "name the task that it was trained on"
        )
    length = task.train_length if given.length is None else given.length
    batches, noise = 4 if given.batches is None else given.batches, given.noise
    found = measure(model, task, length, batches=batches, noise=noise)
    heading = f"{words(task.metric)} at {length}" + (", with noise" if noise else "")
    table = plain_table("bits per entry", "bits of state", heading, left=1)

    def total(bits: int) -> str:
        remaining = math.log2(2**bits + 1) if noise else bits  # see blur_state
        return short_number(remaining * found.numbers)

    for bits, score in found.by_bits.items():
        table.add_row(str(bits), total(bits), f"{score:.3f}")
    table.add_row("exact state", "", f"{found.whole:.3f}")
    if found.whole <= (guess := task.chance()) + TOLERANCE:
        return table, (
            f"The model does not solve the task (a guess scores {guess:.3f}), so its scores do not "
            "tell what it needs."
        )
    if found.needed is None:
        return table, "No number of bits tried suffices."
    if noise:
        return table, f"The score survives noise that leaves at most {total(found.needed)} bits."
    if found.needed == 0:
        return table, f"Without the state, the score falls by at most {TOLERANCE}."
    suffices = f"{count(found.needed, 'bit')} per state entry suffice{'s' * (found.needed == 1)}"
    return table, f"{suffices}: {total(found.needed)} bits in {found.numbers:,} entries."
