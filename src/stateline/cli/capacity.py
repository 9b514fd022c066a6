"""Show what an architecture can hold: bits of its state, strings it could copy, bits it needs.

MODEL is a pattern, or the folder of a trained run, whose state is then rounded to ever fewer bits
to see how many it needs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser

from stateline.models.config import ModelConfig

if TYPE_CHECKING:
    from rich.table import Table

    from stateline.models.language_model import LanguageModel

LENGTHS = (16, 64, 256, 1024, 4096, 16384, 65536)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    option = parser.add_argument
    option("model", type=str, help="layers, as in h3*2, or the folder of a trained run")
    option("--n_letters", type=int, default=26, help="letters that strings are made of")
    option("--task", type=str | None, default=None, help="of a run: task to measure on")
    option("--length", type=int | None, default=None, help="of a run: length to measure at")
    option("--batches", type=int, default=4, help="of a run: batches of problems per score")
    parser.add_class_arguments(ModelConfig, skip={"pattern", "vocab_size", "layers"})


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print the tables."""
    given = parser.parse_args(arguments).as_dict()
    own = {name: given.pop(name) for name in ("model", "n_letters", "task", "length", "batches")}

    from pathlib import Path

    import torch

    from stateline.errors import InputError
    from stateline.generate import load_run
    from stateline.models.language_model import LanguageModel

    if own["n_letters"] < 2:
        raise InputError(f"n_letters must be at least 2, got {own['n_letters']}")
    trained = Path(own["model"]).is_dir()
    if trained:
        model, _ = load_run(own["model"])
    else:
        config = ModelConfig(own["model"], vocab_size=own["n_letters"] + 4, **given)
        with torch.device("meta"):
            model = LanguageModel(config)
    _print_bits(model, own["n_letters"])
    _print_bound(model, own["n_letters"])
    if trained:
        _print_measured(model, own)
    return 0


def _table(*headings: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def _print_bits(model: "LanguageModel", n_letters: int) -> None:
    """Bits of the state, layer by layer."""
    from rich.console import Console

    from stateline.capacity import state_bits
    from stateline.layers.compose import title
    from stateline.reports.format import short_number

    console = Console()
    console.print(
        f"{model.config.pattern}  d_model {model.d_model}, strings of {n_letters} letters"
    )
    table = _table("bits of state after", *(f"{length:,}" for length in LENGTHS))
    for number, part in enumerate(model.stack.links):
        bits = [short_number(state_bits(part, length + 2)) for length in LENGTHS]
        table.add_row(f"{number:>2} {title(part)}", *bits)
    table.add_row("   all", *(short_number(state_bits(model, n + 2)) for n in LENGTHS))
    console.print(table)


def _print_bound(model: "LanguageModel", n_letters: int) -> None:
    """What so many bits bound."""
    import math

    from rich.console import Console

    from stateline.capacity import copy_error_bound, longest_copy, state_bits
    from stateline.reports.format import short_number

    console, longest = Console(), longest_copy(model, n_letters)
    table = _table("letters", *(f"{length:,}" for length in LENGTHS))
    table.add_row("bits of a string", *(short_number(n * math.log2(n_letters)) for n in LENGTHS))
    bounds = [copy_error_bound(state_bits(model, n + 2), n, n_letters) for n in LENGTHS]
    table.add_row("error at least", *(f"{bound:.3g}" for bound in bounds))
    console.print()
    console.print(table)
    if longest is None:
        console.print("The state grows faster than the string: no length is ruled out.")
    else:
        console.print(f"No more than {longest:,} letters fit the state: longer strings fail.")


def _print_measured(model: "LanguageModel", own: dict[str, Any]) -> None:
    """How many bits of its state a trained model needs."""
    from pathlib import Path

    from rich.console import Console

    from stateline.capacity import measure
    from stateline.compare.run import stored
    from stateline.errors import InputError
    from stateline.generate.runs import find_model
    from stateline.reports.format import short_number, words
    from stateline.tasks import GeneratedTask, make_task

    record = stored(Path(own["model"])) or stored(find_model(own["model"])) or {}
    spec = own["task"] or record.get("task")
    if spec is None:
        raise InputError(
            f"{own['model']} does not tell what it was trained on: name a task with --task"
        )
    task = make_task(spec, seed=record.get("seed", 0))
    if own["task"] is None and not isinstance(task, GeneratedTask):
        return
    if task.vocab_size > model.config.vocab_size:
        raise InputError(
            f"the task has {task.vocab_size} tokens and the model {model.config.vocab_size}: "
            "name the task that it was trained on"
        )
    length = task.train_length if own["length"] is None else own["length"]
    found = measure(model, task, length, batches=own["batches"])
    console, table = Console(), _table("bits per number", "bits of state", words(task.metric))
    for bits, score in found.by_bits.items():
        table.add_row(str(bits), short_number(bits * found.numbers), f"{score:.3f}")
    table.add_row("as it is", "", f"{found.whole:.3f}")
    heading = f"\n{spec} at length {length}, the state rounded before the last token"
    console.print(heading, soft_wrap=True)
    console.print(table)
    if found.needed is None:
        console.print("Even the most bits are too few.")
    elif found.needed == 0:
        console.print("Without a single bit the score is the same: the state is of no use.")
    else:
        total = short_number(found.needed * found.numbers)
        console.print(
            f"{found.needed} bits for each of {found.numbers:,} numbers are enough: {total} bits."
        )
