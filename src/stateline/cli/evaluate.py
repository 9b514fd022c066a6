"""Score a model on text files of any length, on a training task with --task, or with --tasks.

If the model's state does not grow, it is carried through each file. If it grows, the file is read
in overlapping windows, by default of 2,048 tokens with a stride of half a window. Tasks are the
probes, or are run by lm-evaluation-harness: SuperGLUE, LAMBADA and WikiText from local files, or
your own.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from stateline.cli.console import plain_table
from stateline.cli.evaluate_task import add_task_options, score_on_task
from stateline.devices import add_device_option, add_dtype_option
from stateline.errors import InputError, unknown_name

if TYPE_CHECKING:
    from stateline.data import Tokenizer
    from stateline.evaluate import TextScore
    from stateline.evaluate.harness import Metric
    from stateline.models.language_model import LanguageModel

WINDOW = 2048
"""Default window in tokens, if the state cannot be carried."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    option = parser.add_argument
    option("run", type=str, help="folder of a run, a checkpoint or a published model; or its file")
    option("files", nargs="*", type=str, help="texts in UTF-8; each is read from its beginning")
    option("--chunk", type=int, default=1024, help="tokens read at a time if state is carried")
    option("--window", type=int | None, default=None, help="tokens in a window; 0 carries state")
    option("--stride", type=int | None, default=None, help="tokens between windows; default half")
    option("--tokenizer", type=str | None, default=None, help="instead of the model's own")
    add_task_options(parser)
    option("--tasks", nargs="+", type=str, default=[], help="tasks, as boolq rte lambada copy_50")
    option("--data", type=str | None, default=None, help="folder with the files of tasks")
    option(
        "--tasks_path",
        type=str | None,
        default=None,
        help="folder with your tasks in YAML; trust it: it may name code and data on a network",
    )
    option("--shots", type=int, default=0, help="solved examples before each question")
    option("--limit", type=int | None, default=None, help="largest number of examples of a task")
    option("--batch_size", type=int, default=8, help="contexts of a task that are read together")
    option("--out", type=str | None, default=None, help="JSON file for the scores")
    add_device_option(parser)
    add_dtype_option(parser)


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print the scores of each file and of all files together, or the scores on tasks."""
    given = parser.parse_args(arguments)
    on_task = given.task is not None or bool(given.lengths)
    if bool(given.files) + bool(given.tasks) + on_task != 1:
        raise InputError("give either text files, --task or --tasks to score the model on")

    from stateline.files import check_writable, user_path, write_text
    from stateline.runs.folder import check_imports

    check_imports(user_path(given.run, "model"))
    if given.tasks:
        _check_tasks(given)
    out = None if given.out is None else user_path(given.out, "file to write")
    if out is not None:
        check_writable(out)
    record = score_on_task(given) if on_task else {"run": given.run, **_score(given)}
    if out is not None:
        write_text(out, json.dumps(record, indent=2) + "\n")
    return 0


def _check_tasks(given: Namespace) -> None:
    """Raise InputError for tasks that are unknown, or need a package that is missing."""
    from stateline.evaluate.harness import LOCAL_TASKS, check_installed
    from stateline.probe import PROBES, is_probe

    for name in ("limit", "batch_size"):
        if given[name] is not None and given[name] < 1:
            raise InputError(f"{name} must be at least 1, got {given[name]}")
    for name in given.tasks:
        if not (is_probe(name) or name in LOCAL_TASKS or given.tasks_path):
            raise unknown_name("task", name, [*LOCAL_TASKS, *PROBES])
    if not all(map(is_probe, given.tasks)):
        check_installed()


def _score(given: Namespace) -> dict[str, Any]:
    from stateline.devices import resolve_device, resolve_dtype
    from stateline.generate import load_run

    device, dtype = resolve_device(given.device), resolve_dtype(given.dtype)
    model, tokenizer = load_run(given.run, device=device, dtype=dtype, tokenizer=given.tokenizer)
    score = _score_tasks if given.tasks else _score_files
    return score(given, model, tokenizer)


def _score_files(
    given: Namespace, model: "LanguageModel", tokenizer: "Tokenizer"
) -> dict[str, Any]:
    from functools import reduce
    from operator import add

    from stateline.evaluate import score_file

    way = {"chunk": given.chunk, "window": _window(given, model), "stride": given.stride}
    scores = {path: score_file(model, tokenizer, path, **way) for path in given.files}
    if way["window"] is None:
        print(f"read in chunks of {given.chunk:,} tokens, with carried state\n")
    else:
        print(f"read in windows of {way['window']:,} tokens, each from an empty state\n")
    total = reduce(add, scores.values())
    _print(scores if len(scores) == 1 else {**scores, "all": total}, total)
    files = {path: _as_json(score) for path, score in scores.items()}
    return {**way, "all": _as_json(total), "files": files}


def _score_tasks(
    given: Namespace, model: "LanguageModel", tokenizer: "Tokenizer"
) -> dict[str, Any]:
    from stateline.evaluate.harness import run_suite
    from stateline.probe import Material, StatelineReader, is_probe, score_probe

    names = ("data", "tasks_path", "shots", "limit", "batch_size")
    settings = {name: given[name] for name in names}
    suites = [name for name in given.tasks if not is_probe(name)]
    metrics = run_suite(model, tokenizer, suites, **settings) if suites else []
    reader, material = StatelineReader(given.run, model, tokenizer), Material(given.data)
    for name in given.tasks:
        if is_probe(name):
            some = {"limit": given.limit, "rows": given.batch_size}
            metrics += score_probe(reader, name, material, **some)
    _print_metrics(metrics)
    scores = [metric._asdict() for metric in metrics]
    return {"tasks": given.tasks, **settings, "scores": scores}


def _print_metrics(metrics: Sequence["Metric"]) -> None:
    from rich.console import Console

    table = plain_table("task", "metric", "score", "standard error", "examples", left=2)
    for metric in metrics:
        stderr = "" if metric.stderr is None else f"{metric.stderr:.4f}"
        score = f"{metric.value:.4f}" if metric.value < 1e6 else f"{metric.value:.4g}"
        table.add_row(metric.task, metric.name, score, stderr, f"{metric.examples:,}")
    Console().print(table)


def _window(given: Namespace, model: "LanguageModel") -> int | None:
    from stateline.generate import growing_layers

    if given.window is not None:
        return given.window or None
    limit = model.max_len
    return min(WINDOW, limit or WINDOW) if growing_layers(model) or limit else None


def _print(scores: dict[str, "TextScore"], total: "TextScore") -> None:
    from rich.console import Console

    console = Console()
    headings = ("tokens", "nats/token", "perplexity", "per word", "bits/byte", "tokens/s")
    files = plain_table("text", *headings, left=1)
    places = plain_table("position", "tokens", "nats/token")
    for name, score in scores.items():
        files.add_row(
            name,
            f"{score.losses.count:,}",
            f"{score.losses.mean:.4f}",
            f"{score.perplexity:.4g}",
            f"{score.word_perplexity:.4g}",
            f"{score.bits_per_byte:.4f}",
            f"{score.tokens_per_second:,.0f}",
        )
    console.print(files)
    console.print()
    start = 1
    for end, mean in total.losses.means().items():
        places.add_row(f"{start:,}-{end:,}", f"{total.losses.counts[end]:,}", f"{mean:.4f}")
        start = end + 1
    console.print(places)


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
