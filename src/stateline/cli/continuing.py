"""The work of ``stateline generate``: reading texts, continuing them, and keeping states."""

import json
import logging
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jsonargparse import Namespace
from torch import Tensor

from stateline import generate
from stateline.cli.options import open_model
from stateline.data import Tokenizer
from stateline.data.chat import chat_text, next_turn, turn_end
from stateline.devices import log_bfloat16_rate, resolve_dtype
from stateline.errors import InputError
from stateline.files import text_file
from stateline.generate import (
    Kept,
    Penalties,
    Sampling,
    Session,
    SessionState,
    Speculation,
    TextStream,
)
from stateline.layers import cat_states, nbytes
from stateline.layers.state import save_state
from stateline.models.language_model import LanguageModel
from stateline.reports.format import short_bytes

log = logging.getLogger("stateline.generate")


@dataclass
class _Reader:
    """A model that reads a text, and its state after the text."""

    model: LanguageModel
    kept: Kept | None = None
    prefixes: generate.PrefixStates | None = None
    state: SessionState | None = None
    key: bytes | None = None
    last: Tensor | None = None
    read: int = 0
    reused: int = 0

    def take(self, tokens: Tensor) -> None:
        """Read the next tokens."""
        self.last = tokens
        if self.prefixes is None:
            self.state = generate.prefill_chunks(self.model, [tokens], self.state)
            return
        found = self.prefixes.read(tokens, self.key)
        self.state, self.key = found.state, found.key
        self.read, self.reused = self.read + len(tokens), self.reused + found.reused


def continue_texts(given: Namespace) -> None:
    """Print the continuation of one prompt, or of several, as the options say."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    sampling = Sampling(**{name: given[name] for name in names})
    _penalties(given, frozenset())  # checks them before anything is read
    model, tokenizer = open_model(given)
    tokenizer.check(given.stop_token_ids)
    if model.device.type == "cpu" and model.dtype == torch.bfloat16:
        log_bfloat16_rate()
    _warn_of_chats(given, tokenizer)
    TextStream(tokenizer, given.stop)  # checks the stop strings before anything is read
    readers = [_Reader(model)]
    if given.draft is not None:
        readers.append(_Reader(_draft(given, tokenizer)))
    growing = [name for reader in readers for name in generate.growing_layers(reader.model)]
    if given.stream and growing and not given.force:
        raise InputError(
            f"--stream needs a state that does not grow, but the state of {', '.join(growing)} "
            "grows: give --force to let memory grow with the text"
        )
    for reader, ending in zip(readers, _ENDINGS, strict=False):
        if given.state is not None:
            path = given.state + ending
            reader.kept = generate.load_kept(path, reader.model, force=given.force)
            reader.state = reader.kept.session
        if given.prefix_cache is not None:
            reader.prefixes = generate.PrefixStates(reader.model, folder=given.prefix_cache)
    if given.prompts is None:
        _continue_one(given, readers, tokenizer, sampling)
    else:
        _continue_batch(given, readers[0], tokenizer, sampling)
    for reader in readers:
        if reader.prefixes is not None:
            reader.prefixes.flush()


_ENDINGS = ("", ".draft")
"""Endings of the names of the state files of a model and of its draft."""


def _draft(given: Namespace, tokenizer: Tokenizer) -> LanguageModel:
    """The draft, which must read the same tokens."""
    draft, draft_tokenizer = open_model(given, given.draft)
    own, other = (each.without_beginning() for each in (tokenizer, draft_tokenizer))
    if other.to_json() != own.to_json():
        raise InputError(
            f"the draft {given.draft} has another tokenizer than {given.run}: give a draft that "
            "was trained with the same one"
        )
    return draft


def _continue_one(
    given: Namespace, readers: Sequence[_Reader], tokenizer: Tokenizer, sampling: Sampling
) -> None:
    """Print one text as it is decoded; text that a later token may change is held back."""
    states, kept = _read(given, readers, tokenizer), readers[0].kept
    session = _session(given, readers, states, sampling)
    _tell_origin(given, kept)
    more = _text_settings(given, tokenizer)
    text = TextStream(tokenizer, given.stop, None if kept is None else kept.text, **more)
    if given.stream or given.prompt is not None:
        numbers = isinstance(tokenizer, generate.NumberTokenizer)
        echo = "" if given.stream or given.chat or numbers else given.prompt
        _show("" if given.log_probs else text.finish() + echo)
        last = states[0].token if readers[0].last is None else readers[0].last
        text = TextStream(tokenizer, given.stop, after=last.tolist(), **more)
    if given.log_probs:
        print("token", "log_prob", "text", sep="\t")
    begin = time.perf_counter()
    penalties = [] if given.draft else [_penalties(given, more["ends"])]
    for token in generate.decode_text(session, [text], given.max_new_tokens, penalties):
        row = f"{token.token}\t{token.log_prob:.6f}\t{json.dumps(token.text, ensure_ascii=False)}\n"
        _show(row if given.log_probs else token.text)
        for reader in readers:
            if reader.prefixes is not None:
                (reader.key,) = reader.prefixes.keys([token.token], reader.key)
    seconds, ends = time.perf_counter() - begin, [session.state()]
    if isinstance(session, Speculation):
        ends.append(session.draft_state())
    _keep(given, readers, ends, text)
    if isinstance(session, Speculation):
        _tell_draft(session, ends[0].length - states[0].length, seconds)


def _keep(
    given: Namespace, readers: Sequence[_Reader], ends: Sequence[SessionState], text: TextStream
) -> None:
    """Keep the state of each model; without ``--save_state``, print text that was held back."""
    for reader, state in zip(readers, ends, strict=True):
        if reader.prefixes is not None and given.state_dtype is None:
            reader.prefixes.keep(reader.key or b"", state)  # a rounded state is not the exact one
    if given.save_state is None:
        _show("" if given.log_probs else text.finish() + "\n")
        return
    held = text.hold()
    for reader, state, ending in zip(readers, ends, _ENDINGS, strict=False):
        save_state(given.save_state + ending, Kept(state, held), reader.model)
    if sys.stdout.isatty() and not given.log_probs:
        print(file=sys.stderr)  # a line break that is not part of the text, which --state continues
    _tell(ends[0], f"in {given.save_state}")


def _read(given: Namespace, readers: Sequence[_Reader], tokenizer: Tokenizer) -> list[SessionState]:
    """The state of each model after the prompt, which comes from stdin or the command line."""
    chunks: Iterable[Tensor] = ()
    begins = readers[0].state is None
    if given.stream:
        chunks = generate.token_chunks(sys.stdin.buffer.read, tokenizer, begins=begins)
    elif given.prompt is not None:
        state = readers[0].state
        last = None if state is None else int(state.token)
        chunks = [_tokens(given, tokenizer, given.prompt, begins=begins, last=last)]
    for chunk in chunks:
        for reader in readers if len(chunk) else ():
            reader.take(chunk)
    states = [reader.state for reader in readers if reader.state is not None]
    if not states:
        raise InputError("the prompt is empty: give at least one token")
    if readers[0].prefixes is not None:
        _tell_reused(readers[0].reused, readers[0].read)
    if readers[0].kept is None or given.seed is not None:
        states = [generate.seeded(state, given.seed or 0) for state in states]
    return states


def _session(
    given: Namespace, readers: Sequence[_Reader], states: Sequence[SessionState], sampling: Sampling
) -> Session | Speculation:
    """The session that decodes the text, alone or with a draft."""
    for reader, state in zip(readers, states, strict=True):
        generate.check_length(reader.model, state.length, given.max_new_tokens)
    (model, *drafts), stored = [reader.model for reader in readers], given.state_dtype
    if not drafts:
        return Session(model, states[0], sampling=sampling, state_dtype=resolve_dtype(stored))
    own, drafted = states
    return Speculation(model, own, drafts[0], drafted, sampling=sampling, ahead=given.ahead)


def _continue_batch(
    given: Namespace, reader: _Reader, tokenizer: Tokenizer, sampling: Sampling
) -> None:
    """Print a JSON object for each prompt, in order; each continues a fork of the kept state."""
    model, prefixes = reader.model, reader.prefixes
    prompts, begins = _lines(given.prompts), reader.state is None
    last = None if reader.state is None else int(reader.state.token)
    rows = [_tokens(given, tokenizer, one, begins=begins, last=last) for one in prompts]
    if prefixes is not None:
        read = [prefixes.read(row) for row in rows]
        state = cat_states([row.state for row in read])
        _tell_reused(sum(row.reused for row in read), sum(map(len, rows)))
    elif reader.state is None:
        state = generate.prefill(model, rows)
    else:
        state = cat_states([generate.extend(model, reader.state, row[None]) for row in rows])
    if reader.kept is None or given.seed is not None:
        state = generate.seeded(state, given.seed or 0)
    else:  # forks of one text draw the numbers of different rows
        random = state.random.clone()
        random[:, 1] += torch.arange(len(rows), device=random.device)
        state = state._replace(random=random)
    stored = resolve_dtype(given.state_dtype)
    generate.check_length(model, state.length, given.max_new_tokens)
    _tell_origin(given, reader.kept)
    more = _text_settings(given, tokenizer)
    texts = [TextStream(tokenizer, given.stop, after=row.tolist(), **more) for row in rows]
    results: list[dict[str, Any]] = [{"prompt": p, "text": ""} for p in prompts]
    session = Session(model, state, sampling=sampling, state_dtype=stored)
    penalties = [_penalties(given, more["ends"]) for _ in rows]
    for decoded in generate.decode_text(session, texts, given.max_new_tokens, penalties):
        result = results[decoded.row]
        result["text"] += decoded.text
        if given.log_probs:
            result.setdefault("tokens", []).append(decoded.token)
            result.setdefault("log_probs", []).append(decoded.log_prob)
    for result, text in zip(results, texts, strict=True):
        result["text"] += text.finish()
        _show(json.dumps(result, ensure_ascii=False) + "\n")


def _tokens(
    given: Namespace, tokenizer: Tokenizer, prompt: str, *, begins: bool, last: int | None
) -> Tensor:
    """The tokens of a prompt, which with ``--chat`` is a message; ``last`` is the one before."""
    if not given.chat:
        encode = tokenizer.prompt if begins else tokenizer.encode
        return torch.from_numpy(encode(prompt))
    said = [{"role": "user", "content": prompt}]
    if not begins:
        tokens = torch.from_numpy(tokenizer.encode(next_turn(tokenizer, said)))
        return tokens[1:] if len(tokens) and int(tokens[0]) == last else tokens
    if given.system is not None:
        said.insert(0, {"role": "system", "content": given.system})
    return torch.from_numpy(tokenizer.encode(chat_text(tokenizer, said)))


def _warn_of_chats(given: Namespace, tokenizer: Tokenizer) -> None:
    if tokenizer.chat_template and not given.chat:
        log.warning("the model is for chats, but the prompt is plain text: give --chat")


def _text_settings(given: Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """What ends a text, in a chat also the end of a turn; and whether special tokens are shown."""
    end = turn_end(tokenizer) if given.chat else None
    own = tokenizer.end_tokens | (frozenset() if end is None else {end})
    ends = (frozenset() if given.ignore_eos else own) | frozenset(given.stop_token_ids)
    return {"ends": ends, "least": given.min_tokens, "special": given.special_tokens}


def _penalties(given: Namespace, ends: frozenset[int]) -> Penalties:
    return Penalties(
        given.presence_penalty, given.frequency_penalty, ends=ends, least=given.min_tokens
    )


def _lines(path: str) -> list[str]:
    file = text_file(path, "file of prompts")
    text = file.read_text(encoding="utf-8", errors="surrogateescape")
    prompts = text.removesuffix("\n").split("\n")  # unlike splitlines, not at a form feed
    if not all(prompts):
        raise InputError(f"{path} must have a prompt in every line, got an empty one")
    return prompts


def _show(text: str) -> None:
    """Print without delay; bytes that are not UTF-8 are shown as U+FFFD."""
    sys.stdout.write(re.sub("[\ud800-\udfff]", "\ufffd", text))
    sys.stdout.flush()


def _tell_origin(given: Namespace, kept: Kept | None) -> None:
    if kept is not None:
        _tell(kept.session, f"from {given.state}")


def _tell_draft(decoding: Speculation, tokens: int, seconds: float) -> None:
    print(
        f"draft: {decoding.accepted} of {decoding.proposed} proposed tokens accepted, "
        f"{tokens / max(1, decoding.rounds):.1f} tokens per round, "
        f"{tokens / seconds:.0f} tokens per second",
        file=sys.stderr,
    )


def _tell_reused(reused: int, total: int) -> None:
    print(f"prefix cache: {reused} of {total} tokens came with a kept state", file=sys.stderr)


def _tell(state: SessionState, where: str) -> None:
    size = short_bytes(nbytes(state.model))
    print(f"state: {size} after {state.length} tokens, {where}", file=sys.stderr)
