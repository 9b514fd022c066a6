"""A server with OpenAI's completions interface, asked by the standard library alone."""

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

from stateline.errors import InputError

LIKELIEST = 5
"""Log-probabilities that are asked for with each token."""

TIMEOUT = 600.0
"""Seconds to wait for an answer."""

_ISOLATION: tuple[dict[str, Any], ...] = ({"cache_salt": ""}, {"cache_prompt": False})
"""Fields of known servers by which a request shares no kept states; a salt is drawn each time."""


class Answer(NamedTuple):
    """An answer to a prompt.

    Attributes:
        text: The text.
        tokens: Its tokens; empty if the server gives no log-probabilities.
        likely: The log-probabilities of the likeliest tokens at each place, in nats.
        prompt_tokens: Tokens of the prompt, as the server counts them.
    """

    text: str
    tokens: tuple[str, ...]
    likely: tuple[dict[str, float], ...]
    prompt_tokens: int


class Refused(Exception):
    """The server refused a request."""


class Server:
    """A server, and what it offers.

    Args:
        url: Address of the interface, as ``http://127.0.0.1:8000/v1``.
        model: Name of the model; by default the first that the server names.
        key: Key of the server.

    Attributes:
        log_probs: Whether it gives log-probabilities.
        isolates: Whether it takes a field by which a request shares no kept states.

    Raises:
        InputError: If it cannot be reached, or does not complete a prompt.
    """

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        self.url, self._key = url.rstrip("/"), key
        try:
            self.model = model or str(self._call("/models")["data"][0]["id"])
        except (Refused, KeyError, IndexError, TypeError) as error:
            raise InputError(f"{url} names no model ({error}): give its name (--model)") from error
        self.log_probs, self._isolation = True, dict[str, Any]()
        try:
            self.log_probs = bool(self.ask("a b", 2).tokens)
        except Refused:
            self.log_probs = False
        try:
            self.ask("a b", 2)
        except Refused as error:
            raise InputError(f"{url} does not complete a prompt: {error}") from error
        for field in _ISOLATION:
            try:
                self._call("/completions", self._request("a b", 2) | _drawn(field))
            except Refused:
                continue
            self._isolation = field
            break
        self.isolates = bool(self._isolation)

    def ask(self, prompt: str, tokens: int, *, fresh: bool = False, stream: bool = False) -> Answer:
        """The likeliest answer of some tokens; ``fresh``: share no kept states, if possible.

        Raises:
            Refused: If the server refuses the request.
            InputError: If it cannot be reached, or answers something else.
        """
        request = self._request(prompt, tokens) | (_drawn(self._isolation) if fresh else {})
        try:
            if stream:
                options = {"stream": True, "stream_options": {"include_usage": True}}
                return _joined(list(self._pieces("/completions", request | options)))
            return _joined([self._call("/completions", request)])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.url} does not answer as OpenAI's completions do: {error!r}"
            ) from error

    def _request(self, prompt: str, tokens: int) -> dict[str, Any]:
        given = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return given | ({"logprobs": LIKELIEST} if self.log_probs else {})

    def _call(self, path: str, request: dict[str, Any] | None = None) -> Any:
        return json.loads(self._open(path, request).read())

    def _pieces(self, path: str, request: dict[str, Any]) -> Iterator[Any]:
        for line in self._open(path, request):
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[6:])

    def _open(self, path: str, request: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if request is None else json.dumps(request).encode()
        try:
            asked = urllib.request.Request(self.url + path, data, headers)
            return urllib.request.urlopen(asked, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                body = error.read(300).decode(errors="replace")
            raise Refused(f"{error.code} {body}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise InputError(
                f"cannot reach {self.url}: {reason}; start the server, or correct the address"
            ) from error


def _drawn(field: dict[str, Any]) -> dict[str, Any]:
    """The field; a salt gets a value that no other request has."""
    return {name: secrets.token_hex(8) if value == "" else value for name, value in field.items()}


def _joined(pieces: list[Any]) -> Answer:
    """Join the pieces of an answer; the last piece has the numbers of tokens."""
    choices = [piece["choices"][0] for piece in pieces if piece["choices"]]
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    tokens = [token for part in logprobs for token in part["tokens"]]
    chances = [chance for part in logprobs for chance in part["token_logprobs"]]
    likely = [dict(top) for part in logprobs for top in part["top_logprobs"]]
    for token, chance, top in zip(tokens, chances, likely, strict=True):
        top[token] = chance
    usage = next((piece["usage"] for piece in reversed(pieces) if piece.get("usage")), None)
    count = 0 if usage is None else int(usage["prompt_tokens"])
    text = "".join(choice["text"] or "" for choice in choices)
    return Answer(text, tuple(tokens), tuple(likely), count)
