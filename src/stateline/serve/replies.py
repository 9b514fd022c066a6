"""From the pieces of texts to the JSON of OpenAI's interfaces."""

import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from stateline.data import Tokenizer
from stateline.generate.text import decoder_after
from stateline.serve.requests import (
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    response_id,
)
from stateline.serve.rows import LogProbs, Piece, Row

Event = tuple[str, dict[str, Any]]
"""A name, or none, and the data of a server-sent event."""

_EARLY = {"length": "max_output_tokens", "time": "max_seconds"}
"""Why a response is incomplete; OpenAI's servers do not have the second reason."""

_SURROGATES = re.compile("[\ud800-\udfff]")


class Text:
    """One text of an answer so far."""

    def __init__(self, text: str = "") -> None:
        self.text, self.tokens, self.reused, self.length = text, 0, 0, 0
        self.finish, self.key = "", b""

    def take(self, pieces: Sequence[Piece]) -> str:
        """Add pieces, and return their text."""
        new = printable("".join(piece.text for piece in pieces))
        self.text += new
        self.tokens += sum(piece.tokens for piece in pieces)
        end = pieces[-1]
        self.reused, self.length = end.reused, end.length
        self.finish, self.key = end.finish, end.key
        return new

    @property
    def reason(self) -> str | None:
        """OpenAI's name of the reason for its end."""
        return "length" if self.finish == "time" else self.finish or None


class Answer(ABC):
    """An answer of one or several texts, which grow by pieces.

    Attributes:
        texts: The texts.
        prompts: The first text of each prompt.
        last: Bytes that end a stream.
        name: Key of the state that is kept after a stream; empty for the hash of the text.
    """

    last = name = b""

    def __init__(self, texts: Sequence[Text], n: int = 1) -> None:
        self.texts, self.prompts, self.created = texts, texts[::n], int(time.time())

    @property
    def done(self) -> bool:
        """Whether all texts have ended."""
        return all(text.finish for text in self.texts)

    def begin(self) -> list[Event]:
        """Events before the first piece."""
        return []

    def add(self, pieces: Sequence[tuple[int, Piece]]) -> list[Event]:
        """Take pieces with the numbers of their texts, and return their events."""
        found: dict[int, list[Piece]] = {}
        for number, piece in pieces:
            found.setdefault(number, []).append(piece)
        events = []
        for number, some in found.items():
            events += self.events(number, self.texts[number].take(some), some)
        return events + (self.end() if self.done else [])

    @abstractmethod
    def events(self, number: int, new: str, pieces: Sequence[Piece]) -> list[Event]:
        """Events for a text with new pieces."""

    def end(self) -> list[Event]:
        """Events after the last piece."""
        return []

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The whole answer."""

    def counts(self) -> tuple[int, int, int]:
        """Tokens of the prompts, those of them that a kept state covers, and new tokens."""
        read = sum(text.length - text.tokens for text in self.prompts)
        reused = sum(text.reused for text in self.prompts)
        return read, reused, sum(text.tokens for text in self.texts)


class _Choices(Answer):
    """An answer with choices: each kind has its names, and its form of log-probabilities."""

    last = b"data: [DONE]\n\n"
    kind = piece_kind = ""

    def __init__(
        self, model: str, given: CompletionRequest | ChatRequest, texts: Sequence[Text], sort: str
    ) -> None:
        super().__init__(texts, given.n)
        self._model, self._usage = model, given.stream_options.include_usage
        self._id = f"{sort}-{secrets.token_hex(12)}"

    def events(self, number: int, new: str, pieces: Sequence[Piece]) -> list[Event]:
        """One chunk."""
        chunk = self._with([self.choice(number, new, pieces)], self.piece_kind)
        return [("", chunk | ({"usage": None} if self._usage else {}))]

    def end(self) -> list[Event]:
        """The numbers of tokens, if they were asked for."""
        if not self._usage:
            return []
        return [("", self._with([], self.piece_kind) | {"usage": self._numbers()})]

    @abstractmethod
    def choice(self, number: int, new: str, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The choice of a chunk."""

    def _with(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self.created}
        return {**head, "model": self._model, "choices": choices}

    def _numbers(self) -> dict[str, Any]:
        read, reused, new = self.counts()
        return {
            "prompt_tokens": read,
            "completion_tokens": new,
            "total_tokens": read + new,
            "prompt_tokens_details": {"cached_tokens": reused},
        }


class CompletionAnswer(_Choices):
    """An answer of ``/v1/completions``."""

    kind = piece_kind = "text_completion"

    def __init__(
        self, model: str, tokenizer: Tokenizer, given: CompletionRequest, rows: Sequence[Row]
    ) -> None:
        super().__init__(model, given, [Text() for _ in rows], "cmpl")
        self._echoed = [""] * len(rows)
        if given.echo:
            prompts = [one for one in given.prompts() for _ in range(given.n)]
            self._echoed = [
                one if isinstance(one, str) else _shown(row, tokenizer)
                for one, row in zip(prompts, rows, strict=True)
            ]
        told = given.logprobs is not None
        self._log_probs = [CompletionLogProbs(tokenizer, row) if told else None for row in rows]

    def choice(self, number: int, new: str, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The new text and its log-probabilities; the first has the echo of the prompt."""
        echo, self._echoed[number] = printable(self._echoed[number]), ""
        text, told = self.texts[number], self._log_probs[number]
        text.text = echo + text.text
        log_probs = None if told is None else told.add(pieces)
        return self._choice(number, echo + new, log_probs)

    def whole(self) -> dict[str, Any]:
        """The completion."""
        choices = [
            self._choice(number, text.text, None if told is None else told.all)
            for number, (text, told) in enumerate(zip(self.texts, self._log_probs, strict=True))
        ]
        return self._with(choices, self.kind) | {"usage": self._numbers()}

    def _choice(self, number: int, text: str, log_probs: Any) -> dict[str, Any]:
        finish = self.texts[number].reason
        return {"index": number, "text": text, "logprobs": log_probs, "finish_reason": finish}


class CompletionLogProbs:
    """Log-probabilities of one text of ``/v1/completions``; ``all`` has those so far."""

    def __init__(self, tokenizer: Tokenizer, row: Row) -> None:
        self._tokenizer = tokenizer
        self._decoder, self._decoded = decoder_after(tokenizer, () if row.scored else row.tokens), 0
        self._silent = frozenset() if row.special else tokenizer.special_tokens
        self.all = self._as_json([])

    def add(self, pieces: Sequence[Piece]) -> dict[str, list[Any]]:
        """The log-probabilities of new pieces."""
        new = self._as_json([one for piece in pieces for one in (*piece.prompt, *piece.log_probs)])
        for name, values in new.items():
            self.all[name] += values
        return new

    def _as_json(self, found: list[LogProbs]) -> dict[str, list[Any]]:
        return {
            "tokens": [token_name(self._tokenizer, one.token) for one in found],
            "token_logprobs": [one.log_prob for one in found],
            "top_logprobs": [self._likely(one) for one in found],
            "text_offset": [self._offset(one.token) for one in found],
        }

    def _offset(self, token: int) -> int:
        """Where the text of the next token begins, after any incomplete character before it."""
        before = self._decoded
        if token in self._silent:
            return before
        self._decoded += len(self._decoder.push(token))
        return max(before, self._decoded - len(self._tokenizer.decode([token])))

    def _likely(self, one: LogProbs) -> dict[str, float] | None:
        """Log-probabilities by name; of tokens with the same text, only the first has it."""
        if one.log_prob is None:
            return None
        named: dict[str, float] = {}
        for token, log_prob in ({one.token: one.log_prob} | dict(one.top)).items():
            name = token_name(self._tokenizer, token)
            named[_number(token) if name in named else name] = log_prob
        return named


class ChatAnswer(_Choices):
    """An answer of ``/v1/chat/completions``."""

    kind, piece_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, tokenizer: Tokenizer, given: ChatRequest, rows: Sequence[Row]
    ) -> None:
        super().__init__(model, given, [Text() for _ in rows], "chatcmpl")
        self._tokenizer = tokenizer
        self._log_probs: list[list[Any]] | None = [[] for _ in rows] if given.logprobs else None

    def begin(self) -> list[Event]:
        """A chunk for each choice that names the role."""
        delta = {"role": "assistant", "content": ""}
        numbers = range(len(self.texts))
        chunks = [self._with([self._choice(n, "delta", delta)], self.piece_kind) for n in numbers]
        return [("", chunk | ({"usage": None} if self._usage else {})) for chunk in chunks]

    def choice(self, number: int, new: str, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The new text and its log-probabilities."""
        told = None
        if self._log_probs is not None:
            told = [self._told(one) for piece in pieces for one in piece.log_probs]
            self._log_probs[number] += told
        return self._choice(number, "delta", {"content": new} if new else {}, told)

    def whole(self) -> dict[str, Any]:
        """The chat completion."""
        choices = []
        for number, text in enumerate(self.texts):
            said = {"role": "assistant", "content": text.text, "refusal": None}
            told = None if self._log_probs is None else self._log_probs[number]
            choices.append(self._choice(number, "message", said, told))
        return self._with(choices, self.kind) | {"usage": self._numbers()}

    def _choice(
        self, number: int, what: str, said: dict[str, Any], told: list[Any] | None = None
    ) -> dict[str, Any]:
        log_probs = None if told is None else {"content": told, "refusal": None}
        finish = self.texts[number].reason
        return {"index": number, what: said, "logprobs": log_probs, "finish_reason": finish}

    def _told(self, one: LogProbs) -> dict[str, Any]:
        likely = [self._named(token, value) for token, value in one.top]
        return {**self._named(one.token, one.log_prob), "top_logprobs": likely}

    def _named(self, token: int, log_prob: float | None) -> dict[str, Any]:
        name = token_name(self._tokenizer, token)
        known = None if name == _number(token) else list(name.encode())
        return {"token": name, "logprob": log_prob, "bytes": known}


class ResponseAnswer(Answer):
    """An answer of ``/v1/responses``, whose id identifies the state after it."""

    def __init__(
        self,
        model: str,
        given: ResponseRequest,
        keep: Callable[[bytes, dict[str, Any]], None] | None = None,
    ) -> None:
        super().__init__([Text()])
        self._model, self._given, self._number, self._keep = model, given, 0, keep
        (self._text,) = self.texts
        self._item = f"msg_{secrets.token_hex(12)}"
        self._place = {"output_index": 0, "item_id": self._item, "content_index": 0}
        self.name, self._id = secrets.token_bytes(32), ""

    def begin(self) -> list[Event]:
        """The first events, with an id that is chosen before the text is known."""
        self._id = response_id(self.name)
        return [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.output_item.added", output_index=0, item=self._message("", True)),
            self._event("response.content_part.added", **self._place, part=_part("")),
        ]

    def events(self, number: int, new: str, pieces: Sequence[Piece]) -> list[Event]:  # noqa: ARG002
        """The new text."""
        if not new:
            return []
        return [self._event("response.output_text.delta", **self._place, delta=new, logprobs=[])]

    def end(self) -> list[Event]:
        """The response."""
        whole, place, text = self.whole(), self._place, self._text.text
        part, item = _part(text), whole["output"][0]
        return [
            self._event("response.output_text.done", **place, text=text, logprobs=[]),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    def whole(self) -> dict[str, Any]:
        """The response, which is kept if it was asked for."""
        self._id = self._id or response_id(self._text.key)
        status = "completed" if self._text.finish == "stop" else "incomplete"
        found = self._response(status)
        if self._keep is not None:
            self._keep(self._text.key, found)
        return found

    def _response(self, status: str) -> dict[str, Any]:
        given, ended = self._given, status != "in_progress"
        early = {"reason": _EARLY[self._text.finish]} if status == "incomplete" else None
        read, reused, new = self.counts()
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": reused},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + new,
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": early,
            "instructions": given.instructions or None,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata,
            "model": self._model,
            "output": [self._message(self._text.text, False)] if ended else [],
            "parallel_tool_calls": False,
            "previous_response_id": given.previous_response_id,
            "store": given.store,
            "temperature": given.temperature,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if given.top_p is None else given.top_p,
            "truncation": "disabled",
            "usage": usage if ended else None,
        }

    def _message(self, text: str, active: bool) -> dict[str, Any]:
        status, parts = ("in_progress", []) if active else ("completed", [_part(text)])
        kind = {"type": "message", "role": "assistant"}
        return {"id": self._item, **kind, "status": status, "content": parts}

    def _event(self, name: str, **data: Any) -> Event:
        self._number += 1
        return name, {"type": name, "sequence_number": self._number - 1, **data}


def printable(text: str) -> str:
    """The text, where bytes that are not UTF-8 are shown as U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token, or its number if the text cannot be printed or is no UTF-8."""
    text = tokenizer.decode([token])
    clear = (text.isprintable() or text.isspace()) and "\ufffd" not in text
    return text if clear else _number(token)


def _shown(row: Row, tokenizer: Tokenizer) -> str:
    silent = frozenset() if row.special else tokenizer.special_tokens
    return tokenizer.decode([token for token in row.tokens if token not in silent])


def _number(token: int) -> str:
    return f"<{token}>"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
