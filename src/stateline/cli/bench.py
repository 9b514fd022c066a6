"""Measure speed and memory on this machine: ops, layers, training updates, decoding.

SUITE is ops (all ops, by length and backend), layers (single layers, beside layers of other
projects), train (updates of small models) or decode (prefill and tokens per second). All candidates
of a case are timed in turns in one process, so that ratios are fair.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from stateline.devices import add_device_option
from stateline.plugins import command_line

LENGTHS = {
    "ops": (256, 1024, 4096, 8192, 65536),
    "layers": (1024, 4096),
    "train": (),
    "decode": (512, 1024, 1536),
}
WIDTH = {"ops": 64, "layers": 256, "train": 64, "decode": 512}
PATTERNS = {
    "ops": (),
    "layers": ("h3", "s4d", "mamba", "mamba2", "attention", "lstm"),
    "train": ("h3*2", "s4d*2", "lstm*2", "attention(position=rope, n_heads=8)*2"),
    "decode": (
        "transformer=attention(position=rope)*12",
        "hybrid=h3 attention h3*5 attention h3*4",
        "h3=h3*12",
    ),
}
SUITES: dict[str, tuple[str, ...]] = {
    "only": ("ops",),
    "patterns": ("layers", "train", "decode"),
    "tasks": ("train",),
    "lengths": ("ops", "layers", "decode"),
    "batches": ("decode",),
    "tokens": ("ops", "layers"),
    "rows": ("ops", "layers"),
    "decode": ("layers",),
    "vocab_size": ("decode",),
    "against": ("layers", "train", "decode"),
    "state_dtype": ("decode",),
    "processor_time": ("ops", "layers", "train"),
}
"""Options that some suites do not have, each with its suites."""

COLUMNS = 140
"""Width of the table where there is no terminal to ask."""

TASKS = ("associative_recall", "copying", "text")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    option = parser.add_argument
    option("suite", type=Literal["ops", "layers", "train", "decode"], help="what to measure")
    option("--only", nargs="+", type=str, default=None, help="of ops: these alone")
    option("--patterns", nargs="+", type=str, default=None, help="layers or models to measure")
    option("--tasks", nargs="+", type=str, default=list(TASKS), help="of train: batches of these")
    option("--lengths", nargs="+", type=int, default=None, help="of a row; of decode: of a prompt")
    option("--batches", nargs="+", type=int, default=[1, 8, 64], help="of decode: rows")
    option("--tokens", type=int, default=8192, help="positions of a batch: rows times length")
    option("--rows", type=int | None, default=None, help="of a batch, in place of --tokens")
    option(
        "--d_model",
        type=int | None,
        default=None,
        help="channels; ops and train 64, layers 256, decode 512",
    )
    option(
        "--decode",
        action="store_true",
        help="of layers: time prefill and single steps, and show the size of the state",
    )
    option("--vocab_size", type=int, default=256, help="of decode: tokens of the vocabulary")
    option("--backends", nargs="+", type=str, default=None, help="by default all of the device")
    option(
        "--against",
        nargs="+",
        type=str,
        default=[],
        help="peers: hf mambapy safari=PATH s4=PATH fla=PATH xlstm=PATH, of train nanogpt=PATH",
    )
    option("--threads", type=int, default=1, help="threads of a CPU")
    option("--seconds", type=float, default=0.5, help="time for each candidate, after warm-up")
    option(
        "--dtype",
        type=Literal["float32", "bfloat16", "float16"],
        default="float32",
        help="of inputs and weights",
    )
    option(
        "--state_dtype",
        type=Literal["float32", "bfloat16", "float16"] | None,
        default=None,
        help="of decode: precision in which states are kept between steps",
    )
    option(
        "--out",
        type=str | None,
        default=None,
        help="folder for SUITE.json, such as ops.json, and plots",
    )
    option(
        "--processor_time",
        action="store_true",
        help="of ops, layers, train on a CPU: time of this process's own work, for busy machines",
    )
    option(
        "--force",
        action="store_true",
        help="print ratios even if the machine is busy",
    )
    add_device_option(parser)


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Measure, print the table, write the results; 1 if the machine was too busy to judge."""
    given = parser.parse_args(arguments)
    _check(given, parser)

    from rich.console import Console

    from stateline.bench.run import measure
    from stateline.bench.show import print_benchmark, write_benchmark

    suite = given.suite
    given.lengths = given.lengths or list(LENGTHS[suite])
    given.patterns = given.patterns or list(PATTERNS[suite])
    given.d_model = given.d_model or WIDTH[suite]
    command = command_line("bench", arguments)
    console = Console()
    if not console.is_terminal:
        console.width = COLUMNS
    with console.status(f"measuring {suite}") as status:
        found = measure(given, command, lambda text: status.update(text))
    print_benchmark(found, console, judge=given.force or not found.busy)
    if given.out is not None:
        for path in write_benchmark(found, Path(given.out)):
            console.print(f"written: {path}", markup=False, soft_wrap=True)
    return 1 if found.busy and not given.force else 0


def _check(given: Namespace, parser: ArgumentParser) -> None:
    """Refuse options that the suite would ignore."""
    from stateline.errors import InputError

    if given.seconds < 0:
        raise InputError(f"seconds must not be negative, got {given.seconds:g}")
    for name, suites in SUITES.items():
        if given.suite not in suites and given[name] != parser.get_default(name):
            raise InputError(f"{given.suite} has no --{name}: it is for {', '.join(suites)}")
