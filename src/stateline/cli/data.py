"""Turn text into tokens on disk, which the task "tokens" trains on.

Stopped and started again, it goes on where it stopped; the result is the same, whatever the number
of workers.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser

from stateline.data import Progress, Recipe

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 5.0
"""Where there is no terminal, at least so long between two lines."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "sources",
        nargs="+",
        type=str,
        help="files, folders, JSON lines (*.jsonl), folders of Dataset.save_to_disk",
    )
    parser.add_argument("--out", type=str, required=True, help="folder for the corpus")
    parser.add_argument(
        "--workers", type=int | None, default=None, help="processes; by default one per core"
    )
    parser.add_class_arguments(Recipe)


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Write the corpus, and say what is in it."""
    given = parser.parse_args(arguments).as_dict()
    sources, out, workers = (given.pop(name) for name in ("sources", "out", "workers"))
    recipe = Recipe(**given)

    from rich.console import Console

    from stateline.data import write_corpus

    console = Console(highlight=False, markup=False, soft_wrap=True)
    with _shown(console) as show:
        corpus = write_corpus(sources, out, recipe, workers=workers, progress=show)
    for name, split in corpus.splits.items():
        n_tokens, n_bytes = len(split.text), int(split.bytes.sum())
        console.print(
            f"{name}: {len(split.names):,} documents, {n_tokens:,} tokens, {n_bytes:,} bytes, "
            f"{n_bytes / max(n_tokens, 1):.3f} bytes per token"
        )
    console.print(f"vocabulary {corpus.tokenizer.vocab_size:,}, newlines: {recipe.newlines}")
    console.print(f'the corpus is in {out}: stateline train h3 --task "tokens(path={out})"')
    return 0


@contextmanager
def _shown(console: "Console") -> Iterator[Callable[[Progress], None]]:
    """Give a function that shows progress: a bar in a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    from rich import progress as bars

    columns = (bars.BarColumn(), bars.TextColumn("{task.description}"), bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=console) as progress:
        bar = progress.add_task("reading the sources", total=None)
        yield lambda news: progress.update(
            bar, total=news.shards, completed=news.done, description=_describe(news)
        )


class _Lines:
    """A line at the beginning and now and then."""

    def __init__(self, console: "Console") -> None:
        self.console, self.last = console, float("-inf")

    def __call__(self, news: Progress) -> None:
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES or news.done == news.shards:
            self.last = time.monotonic()
            self.console.print(_describe(news))


def _describe(news: Progress) -> str:
    left_out = f", documents in no split: {news.left_out:,}" if news.left_out else ""
    return f"{news.done:,} of {news.shards:,} shards, {news.tokens:,} tokens{left_out}"
