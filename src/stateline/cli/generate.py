"""Continue a prompt with a trained model, token by token; the state can be kept."""

import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentParser, Namespace

from stateline.devices import add_device_option, add_dtype_option, resolve_dtype
from stateline.errors import InputError
from stateline.files import check_writable, regular_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from stateline.data import Tokenizer
    from stateline.generate import (
        DecodedToken,
        Kept,
        PrefixStates,
        Sampling,
        Session,
        SessionState,
        Speculation,
        TextStream,
    )
    from stateline.models.language_model import LanguageModel


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    option, maybe = parser.add_argument, str | None
    option("run", type=str, help="folder of a trained model, a run or a checkpoint")
    option("--prompt", type=maybe, default=None, help="text, or token numbers without a tokenizer")
    option("--prompts", type=maybe, default=None, help="file with one prompt per line; prints JSON")
    option("--stream", action="store_true", help="read a prompt of any length from stdin")
    option("--max_new_tokens", type=int, default=256, help="largest number of new tokens")
    option("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    option("--top_k", type=int | None, default=None, help="only the k likeliest tokens")
    option("--top_p", type=float | None, default=None, help="only the likeliest, up to this share")
    option("--repetition_penalty", type=float, default=1.0, help="for tokens seen before (CTRL)")
    option("--stop", action="append", default=[], help="end before this string; repeatable")
    option("--seed", type=int | None, default=None, help="default 0, or the kept state's")
    option("--log_probs", action="store_true", help="one line per token: number, log-prob., text")
    option(
        "--state_dtype",
        type=Literal["float32", "bfloat16", "float16"] | None,
        default=None,
        help="precision in which states are kept between tokens; by default their own",
    )
    option("--save_state", type=maybe, default=None, help="keep the state in this file at the end")
    option("--state", type=maybe, default=None, help="continue from the state in this file")
    option("--draft", type=maybe, default=None, help="folder of a faster model, which proposes")
    option("--ahead", type=int, default=4, help="tokens that the draft proposes at a time")
    option("--prefix_cache", type=maybe, default=None, help="folder of kept states of read texts")
    option("--force", action="store_true", help="accept another model's state; let memory grow")
    add_device_option(parser)
    add_dtype_option(parser)


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print the continuation as it comes."""
    given = parser.parse_args(arguments)
    _check(given)

    from stateline.devices import log_bfloat16_rate, resolve_device
    from stateline.generate import (
        PrefixStates,
        Sampling,
        TextStream,
        growing_layers,
        load_kept,
        load_run,
    )
    from stateline.runs.folder import check_imports

    check_imports(Path(given.run))
    names = ("temperature", "top_k", "top_p", "repetition_penalty")
    sampling = Sampling(**{name: given[name] for name in names})
    device, dtype = resolve_device(given.device), resolve_dtype(given.dtype)
    model, tokenizer = load_run(given.run, device=device, dtype=dtype)
    if device.type == "cpu" and str(model.embedding.weight.dtype) == "torch.bfloat16":
        log_bfloat16_rate()
    TextStream(tokenizer, given.stop)  # checks the stop strings before anything is read
    readings = [_Reading(model)]
    if given.draft is not None:
        readings.append(_Reading(_load_draft(given, tokenizer, device, dtype)))
    growing = [layer for reading in readings for layer in growing_layers(reading.model)]
    if given.stream and growing and not given.force:
        raise InputError(
            f"--stream needs a state that does not grow, but the state of {', '.join(growing)} "
            "grows: give --force to let memory grow with the text"
        )
    for reading, file in zip(readings, _state_files(given.state or ""), strict=False):
        if given.state is not None:
            reading.kept = load_kept(file, reading.model, force=given.force)
        if given.prefix_cache is not None:
            reading.prefixes = PrefixStates(reading.model, folder=given.prefix_cache)
    if given.prompts is None:
        _decode_one(given, readings, tokenizer, sampling)
    else:
        _decode_batch(given, readings[0], tokenizer, sampling)
    for reading in readings:
        if reading.prefixes is not None:
            reading.prefixes.flush()
    return 0


def _state_files(path: str) -> tuple[str, str]:
    """Where the state of the model is, and the state of its draft."""
    return path, f"{path}.draft"


@dataclass
class _Reading:
    """A model that reads a text, and what it knows of it."""

    model: "LanguageModel"
    kept: "Kept | None" = None
    prefixes: "PrefixStates | None" = None
    state: "SessionState | None" = None
    key: bytes | None = None
    read: int = 0
    reused: int = 0

    def take(self, tokens: "Tensor") -> None:
        """Read the next tokens."""
        from stateline.generate import prefill_chunks

        if self.prefixes is None:
            self.state = prefill_chunks(self.model, [tokens], self.state)
            return
        found = self.prefixes.read(tokens, self.key)
        self.state, self.key = found.state, found.key
        self.read, self.reused = self.read + len(tokens), self.reused + found.reused


def _check(given: Namespace) -> None:
    ways = [name for name in ("prompt", "prompts", "stream") if given[name] not in (None, False)]
    if len(ways) > 1:
        raise InputError(f"give one of --prompt, --prompts and --stream, got {' and '.join(ways)}")
    if given.prompts is not None and given.save_state is not None:
        raise InputError(
            "--save_state keeps one text, but --prompts has several: give one --prompt"
        )
    if given.save_state is not None:
        check_writable(Path(given.save_state))
    if given.draft is not None:
        if given.prompts is not None:
            raise InputError("--draft decodes one text: give one --prompt, or leave out --draft")
        if given.state_dtype is not None:
            raise InputError(
                "--draft checks several tokens in one call, which rounds no state between them: "
                "leave out --state_dtype or --draft"
            )
    if given.prefix_cache is not None and given.state is not None:
        raise InputError(
            "--prefix_cache finds states by the text, which --state does not hold: give one of them"
        )
    if not ways and given.state is None:
        given.prompt = "\n"


def _decode_one(
    given: Namespace, readings: "list[_Reading]", tokenizer: "Tokenizer", sampling: "Sampling"
) -> None:
    """Print one text as it is decoded; text that a later token may change is held back."""
    from stateline.generate import NumberTokenizer, Speculation, TextStream, decode_text

    states, kept = _prefill(given, readings, tokenizer), readings[0].kept
    session = _decoding(given, readings, states, sampling)
    _tell_origin(given, kept)
    text = TextStream(tokenizer, given.stop, None if kept is None else kept.text)
    if given.stream or given.prompt is not None:
        echo = "" if given.stream or isinstance(tokenizer, NumberTokenizer) else given.prompt
        _show("" if given.log_probs else text.finish() + echo)
        text = TextStream(tokenizer, given.stop)
    if given.log_probs:
        print("token", "log_prob", "text", sep="\t")
    begin = time.perf_counter()
    for decoded in decode_text(session, [text], given.max_new_tokens):
        _show(_as_row(decoded) if given.log_probs else decoded.text)
        for reading in readings:
            if reading.prefixes is not None:
                (reading.key,) = reading.prefixes.keys([decoded.token], reading.key)
    ends = [session.state()]
    if isinstance(session, Speculation):
        _tell_draft(session, ends[0].length - states[0].length, time.perf_counter() - begin)
        ends.append(session.draft_state())
    _keep(given, readings, ends, text)


def _decoding(
    given: Namespace,
    readings: "list[_Reading]",
    states: "list[SessionState]",
    sampling: "Sampling",
) -> "Session | Speculation":
    """What decodes the text, alone or with a draft."""
    from stateline.generate import Session, Speculation, check_length

    for reading, state in zip(readings, states, strict=True):
        check_length(reading.model, state.length, given.max_new_tokens)
    model = readings[0].model
    if len(readings) == 1:
        stored = resolve_dtype(given.state_dtype)
        return Session(model, states[0], sampling=sampling, state_dtype=stored)
    draft = readings[1].model
    return Speculation(model, states[0], draft, states[1], sampling=sampling, ahead=given.ahead)


def _keep(
    given: Namespace, readings: "list[_Reading]", states: "list[SessionState]", text: "TextStream"
) -> None:
    """Keep the state of each model after the text, and show the text's end if none continues it."""
    from stateline.generate import Kept, save_kept

    for reading, state in zip(readings, states, strict=True):
        if reading.prefixes is not None and given.state_dtype is None:
            reading.prefixes.keep(reading.key or b"", state)  # a rounded state is not the text's
    if given.save_state is None:
        _show("" if given.log_probs else text.finish() + "\n")
        return
    held = text.hold()
    for reading, state, file in zip(readings, states, _state_files(given.save_state), strict=False):
        save_kept(file, Kept(state, held), reading.model)
    _tell(states[0], f"in {given.save_state}")


def _load_draft(
    given: Namespace,
    tokenizer: "Tokenizer",
    device: "torch.device",
    dtype: "torch.dtype | None",
) -> "LanguageModel":
    """The draft, which must read the same tokens."""
    from stateline.generate import load_run
    from stateline.runs.folder import check_imports

    check_imports(Path(given.draft))
    draft, its_tokenizer = load_run(given.draft, device=device, dtype=dtype)
    if its_tokenizer.to_json() != tokenizer.to_json():
        raise InputError(
            f"the draft {given.draft} has another tokenizer than {given.run}: give a draft that "
            "was trained with the same one"
        )
    return draft


def _prefill(
    given: Namespace, readings: "list[_Reading]", tokenizer: "Tokenizer"
) -> "list[SessionState]":
    """The state of each model after the prompt, which comes from stdin or the command line."""
    import torch

    from stateline.generate import seeded, token_chunks

    chunks: Iterable[Tensor] = ()
    if given.stream:
        chunks = token_chunks(sys.stdin.buffer.read, tokenizer)
    elif given.prompt is not None:
        chunks = [torch.from_numpy(tokenizer.encode(given.prompt))]
    for reading in readings:
        reading.state = None if reading.kept is None else reading.kept.session
    for chunk in chunks:
        for reading in readings if len(chunk) else ():
            reading.take(chunk)
    states = [reading.state for reading in readings if reading.state is not None]
    if not states:
        raise InputError("the prompt is empty: give at least one token")
    if readings[0].prefixes is not None:
        _tell_reused(readings[0].reused, readings[0].read)
    if readings[0].kept is None or given.seed is not None:
        states = [seeded(state, given.seed or 0) for state in states]
    return states


def _decode_batch(
    given: Namespace, reading: _Reading, tokenizer: "Tokenizer", sampling: "Sampling"
) -> None:
    """Print a JSON object for each prompt, in order; each continues a fork of the kept state."""
    import torch

    from stateline.generate import (
        Session,
        TextStream,
        check_length,
        decode_text,
        extend,
        prefill,
        seeded,
    )
    from stateline.layers import cat_states

    model, kept, prefixes = reading.model, reading.kept, reading.prefixes
    prompts = _lines(given.prompts)
    rows = [torch.from_numpy(tokenizer.encode(prompt)) for prompt in prompts]
    if prefixes is not None:
        read = [prefixes.read(row) for row in rows]
        state = cat_states([row.state for row in read])
        _tell_reused(sum(row.reused for row in read), sum(map(len, rows)))
    elif kept is None:
        state = prefill(model, rows)
    else:
        state = cat_states([extend(model, kept.session, row[None]) for row in rows])
    state = seeded(state, given.seed or 0)
    check_length(model, state.length, given.max_new_tokens)
    _tell_origin(given, kept)
    texts = [TextStream(tokenizer, given.stop) for _ in rows]
    results: list[dict[str, Any]] = [{"prompt": p, "text": ""} for p in prompts]
    session = Session(model, state, sampling=sampling, state_dtype=resolve_dtype(given.state_dtype))
    for decoded in decode_text(session, texts, given.max_new_tokens):
        result = results[decoded.row]
        result["text"] += decoded.text
        if given.log_probs:
            result.setdefault("tokens", []).append(decoded.token)
            result.setdefault("log_probs", []).append(decoded.log_prob)
    for result, text in zip(results, texts, strict=True):
        result["text"] += text.finish()
        _show(json.dumps(result, ensure_ascii=False) + "\n")


def _lines(path: str) -> list[str]:
    regular_file(Path(path), "file of prompts")
    try:
        prompts = Path(path).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise InputError(
            f"cannot read the prompts in {path}: {error.strerror}; give a file of prompts"
        ) from error
    if not all(prompts) or not prompts:
        raise InputError(f"{path} must have a prompt in every line, got an empty one")
    return prompts


def _as_row(decoded: "DecodedToken") -> str:
    text = json.dumps(decoded.text, ensure_ascii=False)
    return f"{decoded.token}\t{decoded.log_prob:.6f}\t{text}\n"


def _show(text: str) -> None:
    """Print without delay; bytes that are not UTF-8 are shown as U+FFFD."""
    sys.stdout.write(re.sub("[\ud800-\udfff]", "\ufffd", text))
    sys.stdout.flush()


def _tell_origin(given: Namespace, kept: "Kept | None") -> None:
    if kept is not None:
        _tell(kept.session, f"from {given.state}")


def _tell_draft(decoding: "Speculation", tokens: int, seconds: float) -> None:
    print(
        f"draft: {decoding.accepted} of {decoding.proposed} proposed tokens accepted, "
        f"{tokens / max(1, decoding.rounds):.1f} tokens per round, "
        f"{tokens / seconds:.0f} tokens per second",
        file=sys.stderr,
    )


def _tell_reused(reused: int, total: int) -> None:
    print(f"prefix cache: {reused} of {total} tokens came with a kept state", file=sys.stderr)


def _tell(state: "SessionState", where: str) -> None:
    from stateline.layers import nbytes
    from stateline.reports.format import short_bytes

    size = short_bytes(nbytes(state.model))
    print(f"state: {size} after {state.length} tokens, {where}", file=sys.stderr)
