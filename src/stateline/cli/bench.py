"""Measure speed and memory on this machine: ops, layers, training updates, decoding.

SUITE is ops (all ops, by length and backend), layers (single layers, beside layers of other
projects), train (updates of small models) or decode (prefill and tokens per second). All candidates
of a case are timed in turns in one process, so that ratios are fair.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jsonargparse import Namespace

from stateline.cli.console import wide_console
from stateline.cli.options import StateDType, add_device
from stateline.cli.parser import Parser
from stateline.errors import InputError
from stateline.files import check_writable
from stateline.plugins import command_line
from stateline.settings import at_least


class Suite(NamedTuple):
    """What a suite measures by default."""

    d_model: int
    lengths: tuple[int, ...] = ()
    patterns: tuple[str, ...] = ()


SUITES = {
    "ops": Suite(64, (256, 1024, 4096, 8192, 65536)),
    "layers": Suite(256, (1024, 4096), ("h3", "s4d", "mamba", "mamba2", "attention", "lstm")),
    "train": Suite(
        64, patterns=("h3*2", "s4d*2", "lstm*2", "attention(position=rope, n_heads=8)*2")
    ),
    "decode": Suite(
        512,
        (512, 1024, 1536),
        (
            "transformer=attention(position=rope)*12",
            "hybrid=h3 attention h3*5 attention h3*4",
            "h3=h3*12",
        ),
    ),
}

SUITES_OF = {
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
"""Suites by the options that not all of them have."""

COLUMNS = 140
"""Width of the table where there is no terminal to ask."""

TASKS = ["associative_recall", "copying", "text"]


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "suite", type=Literal["ops", "layers", "train", "decode"], help="what to measure"
    )
    option, switch = parser.option, parser.switch
    option("only", list[str], None, "for ops: measure only these")
    option("patterns", list[str], None, "layers or models to measure")
    option("tasks", list[str], TASKS, "for train: tasks of the batches")
    option("lengths", list[int], None, "lengths of rows; for decode: of prompts")
    option("batches", list[int], [1, 8, 64], "for decode: numbers of rows")
    option("tokens", int, 8192, "positions of a batch: rows times length")
    option("rows", int, None, "rows of a batch, in place of --tokens")
    option("d_model", int, None, "channels; ops and train 64, layers 256, decode 512")
    switch("decode", "for layers: time prefill and single steps, and show the size of the state")
    option("vocab_size", int, 256, "for decode: tokens of the vocabulary")
    option("backends", list[str], None, "backends to measure; by default all that the device has")
    peers = "peers: hf mambapy safari=PATH s4=PATH fla=PATH xlstm=PATH; for train nanogpt=PATH"
    option("against", list[str], [], peers)
    option("threads", int, 1, "threads of a CPU")
    option("seconds", float, 0.5, "time for each candidate, after warm-up")
    option("dtype", StateDType, "float32", "precision of inputs and weights")
    option("state_dtype", StateDType, None, "for decode: precision of states between steps")
    option("out", str, None, "folder for SUITE.json, such as ops.json, and plots")
    own_time = "for ops, layers, train on a CPU: time of this process's own work, for busy machines"
    switch("processor_time", own_time)
    switch("force", "print ratios even if the machine is busy")
    add_device(parser)


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Measure, print the table, write the results; 1 if the machine was too busy to judge."""
    given = parser.parse_args(arguments)
    _check(given, parser)
    if given.out is not None:
        check_writable(Path(given.out) / f"{given.suite}.json")

    from stateline.bench.run import measure
    from stateline.bench.show import print_benchmark, write_benchmark

    suite = SUITES[given.suite]
    given.lengths = given.lengths or list(suite.lengths)
    given.patterns = given.patterns or list(suite.patterns)
    given.d_model = given.d_model or suite.d_model
    console = wide_console(COLUMNS)
    with console.status(f"measuring {given.suite}") as status:
        found = measure(given, command_line("bench", arguments), status.update)
    print_benchmark(found, console, judge=given.force or not found.busy)
    if given.out is not None:
        for path in write_benchmark(found, Path(given.out)):
            console.print(f"written: {path}", soft_wrap=True)
    return 1 if found.busy and not given.force else 0


def _check(given: Namespace, parser: Parser) -> None:
    """Refuse options that the suite would ignore."""
    if given.seconds < 0:
        raise InputError(f"seconds must not be negative, got {given.seconds:g}")
    at_least(1, rows=given.rows, d_model=given.d_model)
    parser.refuse_others(given, given.suite, SUITES_OF)
