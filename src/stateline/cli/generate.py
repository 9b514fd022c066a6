"""Continue a prompt with a trained model, token by token, on a state that can be kept."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from stateline.errors import InputError
from stateline.files import check_writable

if TYPE_CHECKING:
    from torch import Tensor

    from stateline.data import Tokenizer
    from stateline.generate import Kept, Sampling, SessionState, Written
    from stateline.models.language_model import LanguageModel


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    option, maybe = parser.add_argument, str | None
    option("run", type=str, help="folder of a trained model, a run or a checkpoint")
    option("--prompt", type=maybe, default=None, help="text, or token numbers without a tokenizer")
    option("--prompts", type=maybe, default=None, help="file of prompts, one a line: JSON comes")
    option("--stream", action="store_true", help="read a prompt of any length from stdin")
    option("--max_new_tokens", type=int, default=256)
    option("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    option("--top_k", type=int | None, default=None, help="only the k likeliest tokens")
    option("--top_p", type=float | None, default=None, help="only the likeliest, up to this share")
    option("--repetition_penalty", type=float, default=1.0, help="of tokens seen before (CTRL)")
    option("--stop", action="append", default=[], help="end before this string; repeatable")
    option("--seed", type=int | None, default=None, help="0, or what the kept state has")
    option("--log_probs", action="store_true", help="a line a token: number, log-prob., text")
    option("--save_state", type=maybe, default=None, help="keep the state in this file at the end")
    option("--state", type=maybe, default=None, help="go on from the state in this file")
    option("--force", action="store_true", help="take another model's state; let memory grow")


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print the continuation as it comes."""
    given = parser.parse_args(arguments)
    _check(given)

    from stateline.generate import Sampling, TextStream, growing_layers, load_kept, load_run

    names = ("temperature", "top_k", "top_p", "repetition_penalty")
    sampling = Sampling(**{name: given[name] for name in names})
    model, tokenizer = load_run(given.run)
    TextStream(tokenizer, given.stop)  # a mistake in it shows before anything is read
    growing = growing_layers(model) if given.stream and not given.force else []
    if growing:
        raise InputError(
            f"--stream wants a state that does not grow, but that of {', '.join(growing)} does: "
            "give --force to let memory grow with the text"
        )
    kept = None if given.state is None else load_kept(given.state, model, force=given.force)
    write = _write_one if given.prompts is None else _write_batch
    write(given, model, tokenizer, kept, sampling)
    return 0


def _check(given: Namespace) -> None:
    ways = [name for name in ("prompt", "prompts", "stream") if given[name] not in (None, False)]
    if len(ways) > 1:
        raise InputError(f"give one of --prompt, --prompts and --stream, got {' and '.join(ways)}")
    if given.prompts is not None and given.save_state is not None:
        raise InputError("--save_state keeps one text, got --prompts: give one --prompt")
    if given.save_state is not None:
        check_writable(Path(given.save_state))
    if not ways and given.state is None:
        given.prompt = "\n"


def _write_one(
    given: Namespace,
    model: "LanguageModel",
    tokenizer: "Tokenizer",
    kept: "Kept | None",
    sampling: "Sampling",
) -> None:
    """One text, printed as it comes; while it is to go on, nothing uncertain is."""
    from stateline.generate import (
        Kept,
        NumberTokenizer,
        Session,
        TextStream,
        check_length,
        save_kept,
        write,
    )

    state = _read(given, model, tokenizer, kept)
    check_length(model, state.length, given.max_new_tokens)
    _tell_begin(given, kept)
    text = TextStream(tokenizer, given.stop, None if kept is None else kept.text)
    if given.stream or given.prompt is not None:
        echo = "" if given.stream or isinstance(tokenizer, NumberTokenizer) else given.prompt
        _show("" if given.log_probs else text.finish() + echo)
        text = TextStream(tokenizer, given.stop)
    if given.log_probs:
        print("token", "log_prob", "text", sep="\t")
    session = Session(model, state, sampling=sampling)
    for written in write(session, [text], given.max_new_tokens):
        _show(_as_row(written) if given.log_probs else written.text)
    if given.save_state is None:
        _show("" if given.log_probs else text.finish() + "\n")
    else:
        kept = Kept(session.state(), text.hold())
        save_kept(given.save_state, kept, model)
        _tell(kept.session, f"in {given.save_state}")


def _read(
    given: Namespace, model: "LanguageModel", tokenizer: "Tokenizer", kept: "Kept | None"
) -> "SessionState":
    """The state after the prompt, from stdin piece by piece or from the command line."""
    import torch

    from stateline.generate import read_pieces, seeded, token_pieces

    pieces: Iterable[Tensor] = ()
    if given.stream:
        pieces = token_pieces(sys.stdin.buffer.read, tokenizer)
    elif given.prompt is not None:
        pieces = [torch.from_numpy(tokenizer.encode(given.prompt))]
    state = read_pieces(model, pieces, None if kept is None else kept.session)
    return state if kept is not None and given.seed is None else seeded(state, given.seed or 0)


def _write_batch(
    given: Namespace,
    model: "LanguageModel",
    tokenizer: "Tokenizer",
    kept: "Kept | None",
    sampling: "Sampling",
) -> None:
    """A JSON object for each prompt, in their order; from a kept state, a fork for each."""
    import torch

    from stateline.generate import Session, TextStream, begin, check_length, read, seeded, write
    from stateline.layers import cat_states

    prompts = _lines(given.prompts)
    rows = [torch.from_numpy(tokenizer.encode(prompt)) for prompt in prompts]
    if kept is None:
        state = begin(model, rows)
    else:
        state = cat_states([read(model, kept.session, row[None]) for row in rows])
    state = seeded(state, given.seed or 0)
    check_length(model, state.length, given.max_new_tokens)
    _tell_begin(given, kept)
    texts = [TextStream(tokenizer, given.stop) for _ in rows]
    results: list[dict[str, Any]] = [{"prompt": p, "text": ""} for p in prompts]
    for written in write(Session(model, state, sampling=sampling), texts, given.max_new_tokens):
        result = results[written.row]
        result["text"] += written.text
        if given.log_probs:
            result.setdefault("tokens", []).append(written.token)
            result.setdefault("log_probs", []).append(written.log_prob)
    for result, text in zip(results, texts, strict=True):
        result["text"] += text.finish()
        _show(json.dumps(result, ensure_ascii=False) + "\n")


def _lines(path: str) -> list[str]:
    try:
        prompts = Path(path).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise InputError(
            f"cannot read the prompts in {path}: {error.strerror}; give a file of prompts"
        ) from error
    if not all(prompts) or not prompts:
        raise InputError(f"{path} must have a prompt in every line, got an empty one")
    return prompts


def _as_row(written: "Written") -> str:
    text = json.dumps(written.text, ensure_ascii=False)
    return f"{written.token}\t{written.log_prob:.6f}\t{text}\n"


def _show(text: str) -> None:
    """Print at once; bytes that are no text are shown as U+FFFD."""
    sys.stdout.write(re.sub("[\ud800-\udfff]", "\ufffd", text))
    sys.stdout.flush()


def _tell_begin(given: Namespace, kept: "Kept | None") -> None:
    if kept is not None:
        _tell(kept.session, f"from {given.state}")


def _tell(state: "SessionState", where: str) -> None:
    from stateline.layers import nbytes
    from stateline.reports.format import short_bytes

    size = short_bytes(nbytes(state.model))
    print(f"state: {size} after {state.length} tokens, {where}", file=sys.stderr)
