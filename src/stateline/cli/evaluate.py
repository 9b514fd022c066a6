"""Score a model on text files of any length, on a training task with --task, or with --tasks.

If the model's state does not grow, it is carried through each file. If it grows, the file is read
in overlapping windows, by default of 2,048 tokens with a stride of half a window. Tasks are the
probes, or are run by lm-evaluation-harness: SuperGLUE, LAMBADA and WikiText from local files, or
your own.
"""

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from stateline.cli.console import plain_table
from stateline.cli.options import (
    add_device_and_dtype,
    add_weights,
    open_model,
    place,
    user_folder,
)
from stateline.cli.parser import Parser
from stateline.errors import InputError, unknown_name
from stateline.files import check_writable, finite, text_file, user_path, write_text
from stateline.settings import at_least

if TYPE_CHECKING:
    from rich.table import Table

    from stateline.evaluate import TextScore
    from stateline.models.language_model import LanguageModel

CHUNK = 1024
"""Default number of tokens that are read at a time."""

WINDOW = 2048
"""Default window in tokens, if the state cannot be carried."""

OF_TASKS = ("data", "tasks_path", "shots", "limit", "rows")
OF_CHATS = ("chat_template", "fewshot_as_multiturn", "system")
"""Options of ``--tasks`` alone."""

KINDS_OF = {
    **dict.fromkeys(("chunk", "stride"), ("text files",)),
    "batches": ("--task",),
    **dict.fromkeys(OF_TASKS + OF_CHATS, ("--tasks",)),
    **dict.fromkeys(("tokenizer", "window"), ("text files", "--tasks")),
}
"""What a model is scored on, by the options that are not for all of it."""


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.argument("run", "folder of a run, a checkpoint or a published model; or its file")
    parser.argument(
        "files", "texts in UTF-8; each is read from its beginning", nargs="*", default=[]
    )
    option = parser.option
    option("chunk", int, CHUNK, "for text files: tokens read at a time if state is carried")
    option("window", int, None, "tokens in a window, with --tasks of a text; 0 carries state")
    option("stride", int, None, "for text files: tokens between windows; default half")
    option("tokenizer", str, None, "tokenizer instead of the model's own")
    about = 'a task that models are trained on, such as "copying(max_len=15)", or own: the run\'s'
    option("task", str, None, about)
    option("lengths", list[int], [], "for --task: lengths of its problems; by default its own")
    option("batches", int, 16, "for --task: batches of problems")
    option("tasks", list[str], [], "tasks, such as boolq rte lambada copy_50")
    option("data", str, None, "for --tasks: folder with their files")
    about = "for --tasks: your own in YAML; trust the folder: it may name code and network data"
    option("tasks_path", str, None, about)
    option("shots", int, None, "for --tasks: solved examples before each question")
    option("limit", int, None, "for --tasks: largest number of examples of each")
    option("rows", int, 8, "for --tasks: prompts that are read at a time")
    parser.switch("chat_template", "for --tasks: ask by the model's template of chats")
    about = "with --chat_template: false makes all examples one message"
    option("fewshot_as_multiturn", bool, True, about)
    option("system", str, None, "with --chat_template: a message of the system before the first")
    option("out", str, None, "JSON file for the scores")
    add_device_and_dtype(parser)
    add_weights(parser)


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Print the scores of each file and of all files together, or the scores on tasks."""
    given = parser.parse_args(arguments)
    on_task = given.task is not None or bool(given.lengths)
    if bool(given.files) + bool(given.tasks) + on_task != 1:
        raise InputError("give either text files, --task or --tasks to score the model on")
    scored = "--task" if on_task else "--tasks" if given.tasks else "text files"
    parser.refuse_others(given, scored, KINDS_OF)
    user_folder(given.run)
    for path in given.files:  # before the model is read
        text_file(path, "text")
    if given.tasks:
        _check_tasks(given)
    out = None if given.out is None else user_path(given.out, "file to write")
    if out is not None:
        check_writable(out)
    score = _score_task if on_task else _score_tasks if given.tasks else _score_files
    record = {"run": given.run, **score(given)}
    if out is not None:
        write_text(out, json.dumps(finite(record), indent=2) + "\n")
    return 0


def _print(*tables: "Table") -> None:
    from rich.console import Console

    console = Console(markup=False)
    for number, table in enumerate(tables):
        if number:
            console.print()
        console.print(table)


def _score_task(given: Namespace) -> dict[str, Any]:
    """Print and return the scores on a training task, at each length."""
    from stateline.runs.evaluate import evaluate_run

    device, dtype = place(given)
    spec, task, batches, scores = evaluate_run(
        user_path(given.run, "model"),
        None if given.task == "own" else given.task,
        lengths=given.lengths,
        batches=given.batches,
        device=device,
        dtype=dtype,
    )
    names = list(next(iter(scores.values())))
    table = plain_table("length", *(name.replace("_", " ") for name in names))
    for length, own in scores.items():
        trained = " (trained)" if length == task.train_length else ""
        table.add_row(f"{length:,}{trained}", *(f"{own[name]:.4f}" for name in names))
    _print(table)
    named = {str(length): own for length, own in scores.items()}
    return {"task": spec, "batches": batches, "scores": named}


def _check_tasks(given: Namespace) -> None:
    """Raise InputError for tasks that are unknown, or need a package that is missing."""
    from stateline.evaluate.harness import LOCAL_TASKS, check_installed
    from stateline.probe import PROBES, is_probe

    at_least(1, limit=given.limit, rows=given.rows)
    if not given.chat_template and (given.system is not None or not given.fewshot_as_multiturn):
        raise InputError("--system and --fewshot_as_multiturn are for chats: give --chat_template")
    for name in given.tasks:
        if not (is_probe(name) or name in LOCAL_TASKS or given.tasks_path):
            raise unknown_name("task", name, [*LOCAL_TASKS, *PROBES])
    if not all(map(is_probe, given.tasks)):
        check_installed()


def _score_tasks(given: Namespace) -> dict[str, Any]:
    """Print and return the scores on evaluation tasks."""
    from stateline.evaluate.harness import Chat, run_suite
    from stateline.probe import Material, StatelineReader, is_probe, score_probe

    model, tokenizer = open_model(given, tokenizer=given.tokenizer)
    settings = {name: given[name] for name in OF_TASKS}
    suites = [name for name in given.tasks if not is_probe(name)]
    chat = Chat(given.fewshot_as_multiturn, given.system) if given.chat_template else None
    more = {**settings, "max_length": given.window, "chat": chat}
    metrics = run_suite(model, tokenizer, suites, **more) if suites else []
    reader, material = StatelineReader(given.run, model, tokenizer), Material(given.data)
    for name in filter(is_probe, given.tasks):
        some = {"limit": given.limit, "rows": given.rows}
        metrics += score_probe(reader, name, material, **some)
    table = plain_table("task", "metric", "score", "standard error", "examples", left=2)
    for metric in metrics:
        stderr = "" if metric.stderr is None else f"{metric.stderr:.4f}"
        score = f"{metric.value:.4f}" if metric.value < 1e6 else f"{metric.value:.4g}"
        table.add_row(metric.task, metric.name, score, stderr, f"{metric.examples:,}")
    _print(table)
    scores = [metric._asdict() for metric in metrics]
    chats = {name: given[name] for name in OF_CHATS} if given.chat_template else {}
    return {"tasks": given.tasks, **settings, "window": given.window, **chats, "scores": scores}


def _score_files(given: Namespace) -> dict[str, Any]:
    """Print and return the scores of texts."""
    from stateline.evaluate import score_file

    model, tokenizer = open_model(given, tokenizer=given.tokenizer)
    way = {"chunk": given.chunk, "window": _window(given, model), "stride": given.stride}
    if given.stride is not None and way["window"] is None:
        raise InputError(
            "--stride is for windows, but the state of this model is carried: give --window, or "
            "leave --stride out"
        )
    if given.chunk != CHUNK and way["window"] is not None:
        raise InputError(
            f"--chunk is for carried state, but windows of {way['window']:,} tokens are read: give "
            "--window 0, or leave --chunk out"
        )
    scores = {path: score_file(model, tokenizer, path, **way) for path in given.files}
    if way["window"] is None:
        print(f"read in chunks of {given.chunk:,} tokens, with carried state\n")
    else:
        overlap = way["window"] - (given.stride or max(1, way["window"] // 2))
        windows = f"windows of {way['window']:,} tokens that overlap by {overlap:,}"
        print(f"read in {windows}, each from an empty state\n")
    total = reduce(add, scores.values())
    shown = scores if len(scores) == 1 else {**scores, "all": total}
    place = "position" if way["window"] is None else "in window"
    places, start = plain_table(place, "tokens", "nats/token"), 1
    for end, mean in total.losses.means().items():
        places.add_row(f"{start:,}-{end:,}", f"{total.losses.counts[end]:,}", f"{mean:.4f}")
        start = end + 1
    _print(_table(shown), places)
    files = {path: _as_json(score) for path, score in scores.items()}
    return {**way, "all": _as_json(total), "files": files}


def _window(given: Namespace, model: "LanguageModel") -> int | None:
    from stateline.generate import growing_layers

    if given.window is not None:
        return given.window or None
    limit = model.max_len
    return min(WINDOW, limit or WINDOW) if growing_layers(model) or limit else None


def _table(scores: "Mapping[str, TextScore]") -> "Table":
    headings = ("tokens", "nats/token", "perplexity", "per word", "bits/byte", "tokens/s")
    table = plain_table("text", *headings, left=1)
    for name, score in scores.items():
        table.add_row(
            name,
            f"{score.losses.count:,}",
            f"{score.losses.mean:.4f}",
            f"{score.perplexity:.4g}",
            f"{score.word_perplexity:.4g}",
            f"{score.bits_per_byte:.4f}",
            f"{score.tokens_per_second:,.0f}",
        )
    return table


def _as_json(score: "TextScore") -> dict[str, Any]:
    return {
        "tokens": score.losses.count,
        "bytes": score.n_bytes,
        "nats_per_token": score.losses.mean,
        "perplexity": score.perplexity,
        "words": score.n_words,
        "word_perplexity": score.word_perplexity,
        "bits_per_byte": score.bits_per_byte,
        "tokens_per_second": score.tokens_per_second,
        "nats_per_token_by_position": score.losses.means(),
    }
