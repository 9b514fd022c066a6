"""Turn text into a corpus of tokens on disk, for training with the task "tokens".

Run the command again after an interruption to continue. The result does not depend on the number of
workers.
"""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stateline.cli.parser import Parser
from stateline.data import Corpus, CorpusSettings, Progress

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 5.0
"""Shortest time between two lines of progress if the output is not a terminal."""


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    about = "files, folders, rows (*.jsonl, *.jsonl.gz, *.parquet), folders of Dataset.save_to_disk"
    parser.argument("sources", about, nargs="+")
    parser.add_argument("--out", type=str, required=True, help="folder for the corpus")
    parser.option("workers", int, None, "number of processes; by default one per core")
    parser.option("splits", str, None, "in place of held_out: a JSON file with lists of files")
    parser.add_class_arguments(CorpusSettings, skip={"splits"})


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Write the corpus, and print a summary."""
    given = parser.parse_args(arguments).as_dict()
    sources, out, workers = (given.pop(name) for name in ("sources", "out", "workers"))
    settings = CorpusSettings(**given)

    from rich.console import Console

    from stateline.data import write_corpus
    from stateline.pattern import Item, format_pattern

    console = Console(highlight=False, markup=False, soft_wrap=True)
    with _shown(console) as show:
        corpus = write_corpus(sources, out, settings, workers=workers, progress=show)
    for name, split in corpus.splits.items():
        n_tokens, n_bytes = len(split.text), int(split.bytes.sum())
        console.print(
            f"{name}: {len(split.names):,} documents, {n_tokens:,} tokens, {n_bytes:,} bytes, "
            f"{n_bytes / max(n_tokens, 1):.3f} bytes per token"
        )
    console.print(f"vocabulary {corpus.tokenizer.vocab_size:,}, newlines: {settings.newlines}")
    if settings.splits is None and settings.parts is None:
        console.print(_held_out(corpus, settings.held_out))
    task = shlex.quote(format_pattern((Item("tokens", {"path": out}),)))
    console.print(f"the corpus is in {out}: stateline train h3 --task {task}")
    return 0


def _held_out(corpus: Corpus, wanted: float) -> str:
    """The share that is held out, which differs from the wanted one if documents are few."""
    sizes = {name: int(split.bytes.sum()) for name, split in corpus.splits.items()}
    share = sizes.get("held_out", 0) / max(sum(sizes.values()), 1)
    return f"held out: {share:.1%} of the bytes (wanted {wanted:.1%}; whole documents, by hash)"


@contextmanager
def _shown(console: "Console") -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows progress: a bar in a terminal, occasional lines elsewhere."""
    from rich import progress as bars

    last = float("-inf")

    def say(news: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES or news.done == news.shards:
            last = time.monotonic()
            console.print(_describe(news))

    if not console.is_terminal:
        yield say
        return
    columns = (bars.BarColumn(), bars.TextColumn("{task.description}"), bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=console) as progress:
        bar = progress.add_task("reading the sources", total=None)
        yield lambda news: progress.update(
            bar, total=news.shards, completed=news.done, description=_describe(news)
        )


def _describe(news: Progress) -> str:
    left_out = f", documents in no split: {news.left_out:,}" if news.left_out else ""
    return f"{news.done:,} of {news.shards:,} shards, {news.tokens:,} tokens{left_out}"
