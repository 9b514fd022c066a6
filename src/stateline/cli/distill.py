"""Turn a trained transformer into a hybrid, which learns from it in stages.

TEACHER is the folder of a language model, ours or published, or hf:FOLDER for the package
transformers to give its logits. Layers of --pattern stand in the places of the teacher's; those of
another kind are new. Each stage is a run in --out; a second start goes on where the first stopped.
The report shows the student beside its teacher.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Any, Literal

from stateline.cli.console import announce, begin, caught_signals, wide_console
from stateline.cli.options import add_device
from stateline.cli.parser import Parser
from stateline.cli.recipe import add_settings, without_defaults
from stateline.devices import resolve_device
from stateline.errors import InputError, check_choice
from stateline.files import user_path
from stateline.plugins import command_line
from stateline.reports.format import short_number
from stateline.settings import at_least

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import torch

    from stateline.runs.results import RunRecord
    from stateline.runs.stages import Distilling, Done
    from stateline.train.processes import Processes


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.argument("teacher", "folder of the teacher; hf:FOLDER for transformers")
    option = parser.option
    parser.add_argument(
        "--pattern", type=str, required=True, help="the layers of the student, or NAME=layers"
    )
    option("text", str, None, "a corpus, or files and folders of which one is made in --out/corpus")
    option("task", str, None, 'in place of --text: a task such as "copying(max_len=15)"')
    option("length", int, 512, "tokens of a row, for --text")
    option("batch_size", int, 8, "rows of an update, for --text")
    about = "tokens of the text that are scored, for --text; by default fewer for large teachers"
    option("held_out_tokens", int, None, about)
    about = "stages with their settings: mixing, outputs, squares, blocks, logits, task"
    option("stages", str, "outputs(steps=500) logits(steps=500)", about)
    option("probes", list[str], [], "what both retrieve: letters, dictionary, ... (see probe)")
    option("probe_lengths", list[int], [], "lengths for --probes; default by probe")
    option("probe_examples", int, 16, "examples of each of four batches, for --probes")
    about = "what is timed; by default short, on a CPU none for large teachers"
    option("timing", Literal["short", "full", "none"], None, about)
    option("out", str, "runs/distilled", "folder for the stages and the report")
    add_settings(parser, without=("teacher", "match"))
    without_defaults(parser)
    option("threads", int, None, "threads on the CPU; by default all cores")
    add_device(parser)


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Train all stages, then report."""
    given = parser.parse_args(arguments)
    begin(f"distilling {given.teacher}")
    at_least(1, threads=given.threads)
    if (given.text is None) == (given.task is None):
        raise InputError("give either --text or --task, which the student is trained on")

    import torch
    from rich.console import Console

    from stateline.cli.progress import show_news
    from stateline.compare.recipe import split_alias
    from stateline.probe import PROBES
    from stateline.runs.stages import Distilling, Done, distil, read_stages, teacher_record
    from stateline.tasks import make_task
    from stateline.train.metrics import COMPLETE
    from stateline.train.processes import join_processes

    if given.threads is not None:
        torch.set_num_threads(given.threads)
    folder, stages = user_path(given.out, "folder to write"), read_stages(given.stages)
    train, model = (
        own.as_dict() if (own := given.get(name)) is not None else {} for name in ("train", "model")
    )
    for probe in given.probes:
        check_choice("probe", probe, PROBES)
    resolve_device(given.device)  # before a corpus is written
    command = command_line("distill", arguments)
    name, pattern = split_alias(given.pattern)
    with join_processes(given.device) as processes, caught_signals() as caught:
        spec = given.task or _text_task(given, folder, processes)
        plan = Distilling(
            given.teacher, pattern, spec, make_task(spec), stages, train, model, folder, name
        )
        plan.check()
        stop, done = lambda: bool(caught), list[Done]()
        last = teacher = teacher_record(plan, processes, announce, stop)
        if teacher.stopped in COMPLETE:
            with show_news(Console(markup=False, quiet=not processes.main)) as news:
                done = distil(
                    plan,
                    command=command,
                    processes=processes,
                    on_log=news.progress,
                    interrupted=stop,
                    tell=announce,
                )
            last = done[-1].run
        if last.stopped == "interrupted":
            print("stopped and saved; the same command goes on")
            return 128 + (caught or [SIGTERM])[0]
        if last.stopped not in COMPLETE:
            raise InputError(last.stopped)
        if processes.main:
            _report(plan, done, teacher, given, command, processes.device)
    return 0


def _text_task(given: Any, folder: Path, processes: "Processes") -> str:
    """The task on a corpus; one process makes it of texts, with the teacher's tokenizer."""
    from stateline.data import CorpusSettings, load_tokenizer, write_corpus
    from stateline.generate.hugging_face import HUGGING_FACE
    from stateline.generate.runs import find_model, own_tokenizer
    from stateline.pattern import Item, format_pattern
    from stateline.runs.stages import scored_tokens

    corpus = user_path(given.text, "text")
    tokenizer = own_tokenizer(find_model(given.teacher.removeprefix(HUGGING_FACE)))
    if tokenizer is not None and load_tokenizer(tokenizer).beginning and processes.main:
        _log.warning(
            "the teacher expects a token before each text, which rows of a corpus lack: it scores "
            "worse here than in use, and teaches what it does without this token"
        )
    if not (corpus / "index.json").exists():
        settings = CorpusSettings(tokenizer="byte" if tokenizer is None else str(tokenizer))
        processes.on_main(
            lambda: write_corpus([given.text], folder / "corpus", settings, workers=1)
        )
        corpus = folder / "corpus"
    scored = given.held_out_tokens
    if scored is None:
        scored = scored_tokens(given.teacher.removeprefix(HUGGING_FACE))
    sizes = {"length": given.length, "batch_size": given.batch_size, "held_out_tokens": scored}
    return format_pattern((Item("tokens", {"path": str(corpus), **sizes}),))


def _report(
    plan: "Distilling",
    done: "Sequence[Done]",
    teacher: "RunRecord",
    given: Any,
    command: str,
    device: "torch.device",
) -> None:
    """Write the pages, and print what the student lost and gained."""
    from stateline import reports
    from stateline.runs.stages import default_timing, write_report

    console, page = wide_console(), plan.folder / "report.html"
    timing = given.timing or default_timing(plan.start, device)
    if timing != "none":
        announce("timing teacher and student")
    results = write_report(plan, done, teacher, command=command, timing=timing, device=device)
    reports.write_report(results, page)
    reports.print_results(results, console)
    student = results.runs[-1]
    tokens, minutes = student.tokens_per_second * student.seconds, student.seconds / 60
    console.print(f"{short_number(tokens)} tokens in {minutes:.1f} minutes of training")
    if given.probes:
        _probe(plan, done[-1].folder, given, command)
    console.print(f"\nthe student is in {done[-1].folder}    report: {page}", soft_wrap=True)


def _probe(plan: "Distilling", student: Path, given: Any, command: str) -> None:
    """Write what teacher and student retrieve, by the length of the context."""
    from stateline.probe import Material, Plan, Settings, load_reader, run_probes
    from stateline.reports.probes import print_probes, write_probes

    models = [plan.start, str(student)]
    wanted = Plan(models, given.probes, given.probe_lengths, Settings(4, given.probe_examples))
    load = partial(load_reader, device=resolve_device(given.device))
    results = run_probes(wanted, Material(None), load, plan.folder, command=command)
    print_probes(results, wide_console())
    write_probes(results, plan.folder / "probes.html")
