"""Probe what models retrieve from their context: look up, copy, answer questions.

MODEL is the folder of a trained run, a folder with published weights, or hf:FOLDER for any causal
language model that the package transformers reads. Scores are written after each length, and a
second start measures only what is missing. With --heads, each head is silenced instead.
"""

from collections.abc import Sequence
from functools import partial

from jsonargparse import Namespace

from stateline.cli.options import add_device_and_dtype, place, user_folder
from stateline.cli.parser import Parser
from stateline.errors import InputError
from stateline.files import check_writable, user_path
from stateline.plugins import command_line

OUT = "runs/probes"


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.argument("models", "folders of models; hf:FOLDER for transformers", nargs="+")
    option = parser.option
    option(
        "tasks",
        list[str],
        ["letters"],
        "phone_book, copy, shuffled_copy, letters, ngram_lookup, dictionary or squad",
    )
    parser.switch("heads", "what --tasks lose without each head; also on tasks such as copying")
    option("windows", list[int], [], "with --heads: how many tokens a head needs to see, of these")
    parser.switch("layers", "the same without each layer")
    option("data", str, None, "folder with names/, text/ and qa/")
    option("tokenizer", str, None, "tokenizer instead of the models' own")
    option("lengths", list[int], [], "lengths for all tasks; default by task")
    option("error", float, 0.1, "half of the 95% interval of exact match; 0 asks all examples")
    about = "largest number of examples per length; default 640, for --heads 64"
    option("examples", int, None, about)
    option("rows", int, 16, "prompts that are read at a time")
    option("seed", int, 0, "seed of the examples")
    option("out", str, OUT, "folder for probes.json and the page")
    add_device_and_dtype(parser)


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Measure, print the table and write the page."""
    given = parser.parse_args(arguments)

    from rich.console import Console

    from stateline.files import model_path
    from stateline.hf_check import HUGGING_FACE
    from stateline.probe import Material, Plan, Settings, load_reader, run_probes
    from stateline.reports.probes import point_line, print_probes, write_probes

    if given.heads or given.layers or given.windows:
        return _heads(given, command_line("probe", arguments))
    device, dtype = place(given)
    many = Settings().examples if given.examples is None else given.examples
    settings = Settings(given.error, many, given.rows, given.seed)
    plan = Plan(given.models, given.tasks, given.lengths, settings, given.tokenizer, given.dtype)
    for model in given.models:
        model_path(model.removeprefix(HUGGING_FACE))
        if not model.startswith(HUGGING_FACE):
            user_folder(model)
    console, folder = Console(markup=False), user_path(given.out, "folder to write")
    check_writable(folder / "probes.html")
    load = partial(load_reader, tokenizer=given.tokenizer, device=device, dtype=dtype)
    results = run_probes(
        plan,
        Material(given.data),
        load,
        folder,
        command=command_line("probe", arguments),
        on_point=lambda point, measured: print(point_line(point, measured=measured), flush=True),
        tell=partial(print, flush=True),
    )
    print_probes(results, console)
    write_probes(results, folder / "probes.html")
    console.print(f"\npage: {folder / 'probes.html'}", soft_wrap=True)
    return 0


def _heads(given: Namespace, command: str) -> int:
    """Measure which heads, or which layers, a model needs."""
    from rich.console import Console

    from stateline.probe import Material, load_reader
    from stateline.probe.ablations import Unit
    from stateline.probe.heads import Question, probe_heads
    from stateline.probe.tasks import PROBES
    from stateline.reports.heads import print_heads, write_heads
    from stateline.tasks import make_task

    (device, dtype), (model, *others) = place(given), given.models
    if others or given.heads == given.layers:
        raise InputError("give one model, and either --heads or --layers")
    if given.windows and (given.layers or min(given.windows) < 1):
        raise InputError("give --windows with --heads, as numbers of tokens from 1")
    questions = []
    for task in given.tasks:
        lengths = PROBES[task].lengths[:1] if task in PROBES else [make_task(task).train_length]
        sizes = (64 if given.examples is None else given.examples, given.rows, given.seed)
        unit: Unit = "heads" if given.heads else "layers"
        for n in given.lengths or lengths:
            questions.append(Question(task, n, unit, *sizes))
            if windows := tuple(sorted({*given.windows})):
                questions.append(Question(task, n, "windows", *sizes, windows))
    console, folder = Console(markup=False), user_path(given.out, "folder to write")
    check_writable(folder / "heads.html")
    load = partial(load_reader, tokenizer=given.tokenizer, device=device, dtype=dtype)
    tell = partial(print, flush=True)
    results = probe_heads(
        model,
        questions,
        Material(given.data),
        load,
        folder,
        settings=(given.tokenizer, given.dtype),
        command=command,
        tell=tell,
    )
    print_heads(results, console)
    write_heads(results, folder / "heads.html")
    console.print(f"\npage: {folder / 'heads.html'}", soft_wrap=True)
    return 0
