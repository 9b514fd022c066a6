"""From the pieces of a text to the JSON of OpenAI's interfaces."""

import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from stateline.data import Tokenizer
from stateline.generate.text import decoder_after
from stateline.serve.engine import LogProbs, Piece
from stateline.serve.requests import ResponseRequest, response_id

Event = tuple[str, dict[str, Any]]
"""A name, or none, and the data of a server-sent event."""

_EARLY = {"length": "max_output_tokens", "time": "max_seconds"}
"""Why a response is incomplete; OpenAI's servers do not have the second reason."""

_SURROGATES = re.compile("[\ud800-\udfff]")


class Answer(ABC):
    """An answer that grows by pieces.

    Attributes:
        done: Whether the last piece has come.
        last: Bytes that end a stream.
        name: Key of the state that is kept after a stream; empty for the hash of the text.
    """

    last = name = b""

    def __init__(self) -> None:
        self.done, self.text, self.tokens, self.reused, self.length = False, "", 0, 0, 0
        self.finish, self.key, self.created = "", b"", int(time.time())

    def begin(self) -> list[Event]:
        """Events before the first piece."""
        return []

    def add(self, pieces: list[Piece]) -> list[Event]:
        """Take pieces, and return their events."""
        new = printable("".join(piece.text for piece in pieces))
        self.text += new
        self.tokens += sum(piece.tokens for piece in pieces)
        end = pieces[-1]
        self.reused, self.length = end.reused, end.length
        self.finish, self.key = end.finish, end.key
        self.done = bool(end.finish)
        return self.events(new, pieces)

    @abstractmethod
    def events(self, new: str, pieces: list[Piece]) -> list[Event]:
        """Events for new text."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The whole answer."""


class CompletionAnswer(Answer):
    """An answer of ``/v1/completions``."""

    last = b"data: [DONE]\n\n"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        log_probs: bool,
        usage: bool,
        after: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._model, self._tokenizer, self._usage = model, tokenizer, usage
        self._decoder, self._decoded = decoder_after(tokenizer, after if log_probs else ()), 0
        self._log_probs = self._as_json([]) if log_probs else None
        self._id = f"cmpl-{secrets.token_hex(12)}"

    def events(self, new: str, pieces: list[Piece]) -> list[Event]:
        """One chunk, and one with the numbers of tokens at the end if these were asked for.

        If so, the other chunks have a null in their place, as OpenAI's have.
        """
        logprobs = None
        if self._log_probs is not None:
            logprobs = self._as_json([one for piece in pieces for one in piece.log_probs])
            for name, values in logprobs.items():
                self._log_probs[name] += values
        chunks = [self._with([self._choice(new, logprobs)])]
        if self._usage:
            chunks[0]["usage"] = None
            if self.done:
                chunks.append(self._with([]) | {"usage": self._numbers()})
        return [("", chunk) for chunk in chunks]

    def whole(self) -> dict[str, Any]:
        """The completion."""
        choice = self._choice(self.text, self._log_probs)
        return self._with([choice]) | {"usage": self._numbers()}

    def _choice(self, text: str, log_probs: dict[str, Any] | None) -> dict[str, Any]:
        finish = "length" if self.finish == "time" else self.finish or None
        return {"index": 0, "text": text, "logprobs": log_probs, "finish_reason": finish}

    def _with(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id, "object": "text_completion", "created": self.created}
        return {**head, "model": self._model, "choices": choices}

    def _numbers(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.length - self.tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.length,
            "prompt_tokens_details": {"cached_tokens": self.reused},
        }

    def _as_json(self, found: list[LogProbs]) -> dict[str, list[Any]]:
        return {
            "tokens": [self._name(one.token) for one in found],
            "token_logprobs": [one.log_prob for one in found],
            "top_logprobs": [self._likely(one) for one in found],
            "text_offset": [self._offset(one.token) for one in found],
        }

    def _offset(self, token: int) -> int:
        """Where the text of the next token begins, after any incomplete character before it."""
        before = self._decoded
        self._decoded += len(self._decoder.push(token))
        return max(before, self._decoded - len(self._tokenizer.decode([token])))

    def _likely(self, one: LogProbs) -> dict[str, float]:
        """Log-probabilities by name; of tokens with the same text, only the first has it."""
        named: dict[str, float] = {}
        for token, log_prob in ({one.token: one.log_prob} | dict(one.top)).items():
            name = self._name(token)
            named[_number(token) if name in named else name] = log_prob
        return named

    def _name(self, token: int) -> str:
        """The text of a token, or its number if the text cannot be printed or is no UTF-8."""
        text = self._tokenizer.decode([token])
        clear = (text.isprintable() or text.isspace()) and "\ufffd" not in text
        return text if clear else _number(token)


class ResponseAnswer(Answer):
    """An answer of ``/v1/responses``, whose id identifies the state after it."""

    def __init__(self, model: str, given: ResponseRequest) -> None:
        super().__init__()
        self._model, self._given, self._number = model, given, 0
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

    def events(self, new: str, pieces: list[Piece]) -> list[Event]:  # noqa: ARG002
        """The new text, and at the end the response."""
        place, found = self._place, []
        if new:
            found.append(self._event("response.output_text.delta", **place, delta=new, logprobs=[]))
        if self.done:
            whole = self.whole()
            part, item = _part(self.text), whole["output"][0]
            found += [
                self._event("response.output_text.done", **place, text=self.text, logprobs=[]),
                self._event("response.content_part.done", **place, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{whole['status']}", response=whole),
            ]
        return found

    def whole(self) -> dict[str, Any]:
        """The response."""
        self._id = self._id or response_id(self.key)
        status = "completed" if self.finish == "stop" else "incomplete"
        return self._response(status)

    def _response(self, status: str) -> dict[str, Any]:
        given, ended = self._given, status != "in_progress"
        early = {"reason": _EARLY[self.finish]} if status == "incomplete" else None
        prompt = self.length - self.tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.reused},
            "output_tokens": self.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.length,
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": early,
            "instructions": None,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata or {},
            "model": self._model,
            "output": [self._message(self.text, False)] if ended else [],
            "parallel_tool_calls": False,
            "previous_response_id": given.previous_response_id,
            "store": given.store is not False,
            "temperature": 1.0 if given.temperature is None else given.temperature,
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


def _number(token: int) -> str:
    return f"<{token}>"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
