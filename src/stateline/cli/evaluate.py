"""Score a model on text files of any length: perplexity, bits per byte, loss by position.

The state is carried through each file where it does not grow. Where it does, the file is read in
windows of 2,048 tokens that overlap by half, unless told.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

if TYPE_CHECKING:
    from stateline.evaluate import TextScore
    from stateline.models.language_model import LanguageModel

WINDOW = 2048
"""Tokens in a window, where nothing is said and the state cannot be carried."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    option = parser.add_argument
    option("run", type=str, help="folder of a trained model, a run or a checkpoint")
    option("files", nargs="+", type=str, help="texts in UTF-8; each is read from its beginning")
    option("--chunk", type=int, default=1024, help="tokens read at a time with carried state")
    option("--window", type=int | None, default=None, help="tokens in a window; 0 carries state")
    option("--stride", type=int | None, default=None, help="from window to window; default half")
    option("--out", type=str | None, default=None, help="JSON file for the scores")


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print the scores of each file and of all."""
    given = parser.parse_args(arguments)

    from functools import reduce
    from operator import add
    from pathlib import Path

    from stateline.evaluate import score_file
    from stateline.files import check_writable, write_text
    from stateline.generate import load_run

    if given.out is not None:
        check_writable(Path(given.out))
    model, tokenizer = load_run(given.run)
    way = {"chunk": given.chunk, "window": _window(given, model), "stride": given.stride}
    scores = {path: score_file(model, tokenizer, path, **way) for path in given.files}
    if way["window"] is None:
        print(f"read in chunks of {given.chunk:,} tokens, the state carried\n")
    else:
        print(f"read in windows of {way['window']:,} tokens, each from an empty state\n")
    total = reduce(add, scores.values())
    _print(scores if len(scores) == 1 else {**scores, "all": total}, total)
    if given.out is not None:
        files = {path: _as_json(score) for path, score in scores.items()}
        record = {"run": given.run, **way, "all": _as_json(total), "files": files}
        write_text(Path(given.out), json.dumps(record, indent=2) + "\n")
    return 0


def _window(given: Namespace, model: "LanguageModel") -> int | None:
    from stateline.generate import growing_layers

    if given.window is not None:
        return given.window or None
    limit = model.max_len
    return min(WINDOW, limit or WINDOW) if growing_layers(model) or limit else None


def _print(scores: dict[str, "TextScore"], total: "TextScore") -> None:
    from rich.console import Console
    from rich.table import Table

    console, files, places = Console(), *(Table(box=None, pad_edge=False) for _ in range(2))
    headings = ("text", "tokens", "nats/token", "perplexity", "bits/byte", "tokens/s")
    for heading in headings:
        files.add_column(heading, justify="left" if heading == "text" else "right")
    for name, score in scores.items():
        files.add_row(
            name,
            f"{score.losses.count:,}",
            f"{score.losses.mean:.4f}",
            f"{score.perplexity:.4g}",
            f"{score.bits_per_byte:.4f}",
            f"{score.tokens_per_second:,.0f}",
        )
    console.print(files)
    console.print()
    for heading in ("position", "tokens", "nats/token"):
        places.add_column(heading, justify="right")
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
        "bits_per_byte": score.bits_per_byte,
        "tokens_per_second": score.tokens_per_second,
        "nats_per_token_by_position": score.losses.means(),
    }
