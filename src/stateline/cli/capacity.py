"""Show what an architecture can hold: bits of its state, strings it could copy, bits it needs.

MODEL is a pattern, or the folder of a trained run, whose state is then rounded to ever fewer bits
(or blurred by noise) to see how many it needs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser

from stateline.models.config import ModelConfig

if TYPE_CHECKING:
    from rich.table import Table

    from stateline.layers.base import AnyLayer
    from stateline.models.language_model import LanguageModel
    from stateline.tasks import Task

LENGTHS = (16, 64, 256, 1024, 4096, 16384, 65536)

OF_A_RUN = ("task", "length", "batches", "noise")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    option = parser.add_argument
    option("model", type=str, help="layers, as in h3*2, or the folder of a trained run")
    option("--n_letters", type=int, default=26, help="letters that strings are made of")
    option("--task", type=str | None, default=None, help="of a run: the task to measure on")
    option("--length", type=int | None, default=None, help="of a run: where; default as trained")
    option("--batches", type=int | None, default=None, help="of a run: per score; 4 by default")
    option("--noise", type=bool | None, default=None, help="of a run: add noise, do not round")
    parser.add_class_arguments(ModelConfig, skip={"pattern", "vocab_size", "layers"})


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print the tables."""
    given = parser.parse_args(arguments).as_dict()
    own = {name: given.pop(name) for name in ("model", "n_letters", *OF_A_RUN)}

    from pathlib import Path

    import torch
    from rich.console import Console

    from stateline.errors import InputError
    from stateline.generate import load_run
    from stateline.models.language_model import LanguageModel

    if own["n_letters"] < 2:
        raise InputError(f"n_letters must be at least 2, got {own['n_letters']}")
    if Path(own["model"]).is_dir():
        model, task = load_run(own["model"])[0], _task(own["model"], own["task"])
        measured = [_measured(model, task, own)] if task else []
    else:
        _check_pattern(own)
        config = ModelConfig(own["model"], vocab_size=own["n_letters"] + 4, **given)
        with torch.device("meta"):
            model, measured = LanguageModel(config), []
    console = Console()
    console.print(f"{model.config.pattern}  d_model {model.d_model}")
    for table, verdict in [*_bound(model, own["n_letters"]), *measured]:
        console.print()
        console.print(table)
        if verdict:
            console.print(verdict)
    return 0


def _check_pattern(own: dict[str, Any]) -> None:
    """Raise InputError if what was given is for a trained run, or may be the name of one."""
    from stateline.errors import InputError

    if "/" in own["model"]:
        raise InputError(f"MODEL must be a pattern or a folder that is there, got {own['model']!r}")
    if given := [f"--{name}" for name in OF_A_RUN if own[name] is not None]:
        raise InputError(
            f"{', '.join(given)} can be given for the folder of a trained run alone, not for the "
            f"pattern {own['model']!r}, which has learned nothing to be measured"
        )


def _task(folder: str, named: str | None) -> "Task | None":
    """The task to measure a run on: the one that is named, or else its own, if it is decoded."""
    from pathlib import Path

    from stateline.compare.run import stored
    from stateline.errors import InputError
    from stateline.generate.runs import find_model
    from stateline.tasks import GeneratedTask, make_task

    record = stored(Path(folder)) or stored(find_model(folder)) or {}
    spec = named or record.get("task")
    if spec is None:
        raise InputError(f"{folder} does not tell what it was trained on: name a task with --task")
    task = make_task(spec, seed=record.get("seed", 0))
    return task if named or isinstance(task, GeneratedTask) else None


def _table(*headings: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def _bound(model: "LanguageModel", n_letters: int) -> list[tuple["Table", str]]:
    """Bits of the state after BOS, a string and SEP, layer by layer; and what they bound."""
    import math

    from stateline.capacity import copy_error, longest_copy, state_bits
    from stateline.layers.compose import title
    from stateline.reports.format import DASH, short_number

    def size(part: "AnyLayer", length: int) -> str:
        within = model.max_len is None or length + 2 <= model.max_len
        return short_number(state_bits(part, length + 2)) if within else DASH

    parts = {f"{n:>2} {title(part)}": part for n, part in enumerate(model.stack.links)}
    bits = _table("bits of state after", *(f"{length:,}" for length in LENGTHS))
    for name, part in {**parts, "   all": model}.items():
        bits.add_row(name, *(size(part, n) for n in LENGTHS))

    bound = _table(f"letters, of {n_letters}", *(f"{length:,}" for length in LENGTHS))
    bound.add_row("bits of a string", *(short_number(n * math.log2(n_letters)) for n in LENGTHS))
    errors = [copy_error(model, n, n_letters) for n in LENGTHS]
    bound.add_row("copying fails in at least", *(f"{error:.3g}" for error in errors))

    longest = longest_copy(model, n_letters)
    if longest is None:
        return [
            (bits, ""),
            (bound, "The state grows as fast as the string: no length is too long."),
        ]
    return [
        (bits, ""),
        (bound, f"At most {longest:,} letters fit: not all longer strings can be copied."),
    ]


def _measured(model: "LanguageModel", task: "Task", own: dict[str, Any]) -> tuple["Table", str]:
    """How many bits of its state a trained model needs."""
    import math

    from stateline.capacity import measure
    from stateline.errors import InputError
    from stateline.reports.format import count, short_number, words

    if task.vocab_size > model.config.vocab_size:
        raise InputError(
            f"the task has {task.vocab_size} tokens and the model {model.config.vocab_size}: "
            "name the task that it was trained on"
        )
    length = task.train_length if own["length"] is None else own["length"]
    batches = 4 if own["batches"] is None else own["batches"]
    found = measure(model, task, length, batches=batches, noise=bool(own["noise"]))
    heading = f"{words(task.metric)} at {length}" + (", with noise" if own["noise"] else "")
    table = _table("bits of a number", "bits of state", heading)

    def total(bits: int) -> str:
        through = math.log2(2**bits + 1) if own["noise"] else bits  # see blur_state
        return short_number(through * found.numbers)

    for bits, score in found.by_bits.items():
        table.add_row(str(bits), total(bits), f"{score:.3f}")
    table.add_row("as it is", "", f"{found.whole:.3f}")
    if found.needed is None:
        return table, "Even the most bits are too few."
    if own["noise"]:
        return table, f"Noise is borne that lets no more than {total(found.needed)} bits through."
    if found.needed == 0:
        return table, "Without a single bit the score is the same: the state is of no use."
    each = count(found.needed, "bit")
    return table, f"{each} of each of {found.numbers:,} numbers do: {total(found.needed)} bits."
