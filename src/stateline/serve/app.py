"""The HTTP side: routes, keys, streams, and one line for every error."""

import asyncio
import ipaddress
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from stateline.data import Tokenizer
from stateline.errors import InputError
from stateline.generate import PrefixStates
from stateline.serve.engine import Engine
from stateline.serve.metrics import Metrics
from stateline.serve.replies import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    ResponseAnswer,
    printable,
)
from stateline.serve.requests import ChatRequest, CompletionRequest, ResponseRequest, decode
from stateline.serve.rows import BusyError, Limits, Piece, Row

KEPT = 1 << 24
"""Bytes of responses that are kept for ``GET``, the newest ones."""

_encode = msgspec.json.Encoder().encode


class Ticket:
    """The pieces of the texts of a request on their way from the engine to its client."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows, self.pieces, self.news = rows, list[tuple[int, Piece]](), asyncio.Event()
        for number, row in enumerate(rows):
            row.put = partial(self.put, number)

    def put(self, number: int, piece: Piece) -> None:
        """Add a piece of a text, in the event loop's thread."""
        self.pieces.append((number, piece))
        self.news.set()

    @property
    def left(self) -> bool:
        """Whether the client has left."""
        return any(row.left for row in self.rows)

    def leave(self) -> None:
        """Let all rows leave before the next step."""
        for row in self.rows:
            row.left = True

    async def take(self) -> list[tuple[int, Piece]]:
        """Wait for new pieces and return them; empty once the client has left."""
        await self.news.wait()
        if not self.left:
            self.news.clear()
        pieces, self.pieces = self.pieces, []
        return pieces

    async def watch(self, receive: Receive) -> None:
        """Wait until the client leaves; the rows then leave before the next step."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.leave()
        self.news.set()


def make_app(
    prefixes: PrefixStates,
    tokenizer: Tokenizer,
    name: str,
    *,
    limits: Limits | None = None,
    key: str | None = None,
    local: bool = False,
    origins: Sequence[str] = (),
) -> Starlette:
    """The application that serves a model.

    Args:
        prefixes: Kept states of the model; those with a folder outlive the process.
        tokenizer: The model's tokenizer.
        name: Name of the model for clients.
        limits: Limits for the requests of clients.
        key: What clients must send as ``Authorization: Bearer KEY``; by default nothing.
        local: Whether only names of this machine are taken as ``Host``. A page of another site
            whose name was pointed at this machine has its own name there.
        origins: Sites whose pages may use the server (CORS); ``*`` are all.

    Returns:
        A Starlette application, whose engine runs from its start-up to its shutdown.
    """
    service = Service(prefixes, tokenizer, name, limits or Limits(), key, local)
    one, both = ["POST"], ["GET", "DELETE"]
    routes = [
        Route("/v1/completions", service.completions, methods=one),
        Route("/v1/chat/completions", service.chats, methods=one),
        Route("/v1/responses", service.responses, methods=one),
        Route("/v1/responses/{id}", service.response, methods=both),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.models),
        Route("/metrics", service.show_metrics),
        Route("/health", service.health),
    ]
    handlers: Any = dict.fromkeys((InputError, HTTPException, ClientDisconnect), _refusal)
    app = Starlette(routes=routes, lifespan=service.lifespan, exception_handlers=handlers)
    app.state.service = service
    app.add_middleware(_Guard, service=service)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


class Service:
    """What the routes share; arguments as for :func:`make_app`."""

    def __init__(
        self,
        prefixes: PrefixStates,
        tokenizer: Tokenizer,
        name: str,
        limits: Limits,
        key: str | None,
        local: bool,
    ) -> None:
        self.name, self.limits, self.key, self.local = name, limits, key, local
        self.tokenizer, self.metrics, self._began = tokenizer, Metrics(), int(time.time())
        self.bodies = 0  # bytes of all requests without an answer
        self._told = OrderedDict[str, tuple[bytes, bytes]]()  # responses: key of the state, JSON
        self._loop: asyncio.AbstractEventLoop | None = None
        self.engine = Engine(
            tokenizer, prefixes, limits=limits, deliver=self._deliver, metrics=self.metrics
        )

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:  # noqa: ARG002
        """Run the engine while the server runs."""
        self._loop = asyncio.get_running_loop()
        self.engine.start()
        yield
        await asyncio.to_thread(self.engine.stop)

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        given, prompts = await self._read(request, CompletionRequest)
        rows = [row for prompt in prompts for row in prompt]
        answer = CompletionAnswer(self.name, self.tokenizer, given, rows)
        return await self._answer(request, prompts, answer, stream=given.stream)

    async def chats(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        given, prompts = await self._read(request, ChatRequest)
        answer = ChatAnswer(self.name, self.tokenizer, given, prompts[0])
        return await self._answer(request, prompts, answer, stream=given.stream)

    async def responses(self, request: Request) -> Response:
        """``POST /v1/responses``."""
        given, prompts = await self._read(request, ResponseRequest)
        answer = ResponseAnswer(self.name, given, self._keep if given.store else None)
        return await self._answer(request, prompts, answer, stream=given.stream)

    async def response(self, request: Request) -> Response:
        """``GET`` and ``DELETE /v1/responses/ID``."""
        name = request.path_params["id"]
        if name not in self._told:
            raise HTTPException(
                404, f"there is no response {name[:100]!r}, or it is no longer kept"
            )
        if request.method != "DELETE":
            return Response(self._told[name][1], media_type="application/json")
        key, _ = self._told.pop(name)
        if all(key != other for other, _ in self._told.values()):
            self.engine.forget(key)
        return _json({"id": name, "object": "response", "deleted": True})

    def _keep(self, key: bytes, whole: dict[str, Any]) -> None:
        """Keep a response for ``GET``, and drop the oldest ones beyond the limit."""
        self._told[whole["id"]] = key, _encoded(whole)
        while sum(len(told) for _, told in self._told.values()) > KEPT:
            self._told.popitem(last=False)

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``, and one of them."""
        model = {"id": self.name, "object": "model", "created": self._began, "owned_by": "local"}
        wanted = request.path_params.get("name")
        if wanted is None:
            return _json({"object": "list", "data": [model]})
        self._check_name(wanted)
        return _json(model)

    async def show_metrics(self, request: Request) -> Response:  # noqa: ARG002
        """``GET /metrics``."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """``GET /health``: 200 while texts are taken."""
        return Response(status_code=200 if self.engine.running else 503)

    async def _read(self, request: Request, kind: Any) -> tuple[Any, list[list[Row]]]:
        """The request, checked, and the rows of each of its prompts."""
        sort = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if sort != "application/json":  # so that pages of other sites cannot send requests
            raise HTTPException(415, f"the content type must be application/json, got {sort!r}")
        parts, held = [], request.scope["stateline"]
        async for part in request.stream():
            parts.append(part)
            self.bodies += len(part)
            held["body"] += len(part)
            if held["body"] > self.limits.body:
                raise HTTPException(413, f"a request may have at most {self.limits.body} bytes")
            if self.bodies > self.limits.bodies:
                raise BusyError("the server holds too many bytes of requests: ask again later")
        return await asyncio.to_thread(self._rows_of, b"".join(parts), kind)

    def _rows_of(self, body: bytes, kind: Any) -> tuple[Any, list[list[Row]]]:
        given = decode(body, kind)
        self._check_name(given.model)
        return given, given.rows(self.tokenizer)

    def _check_name(self, name: str) -> None:
        if name != self.name:
            raise HTTPException(404, f"there is no model {name[:100]!r}: this is {self.name!r}")

    async def _answer(
        self, request: Request, prompts: list[list[Row]], answer: Answer, *, stream: bool
    ) -> Response:
        ticket = Ticket([row for prompt in prompts for row in prompt])
        try:
            for rows in prompts:
                if stream:
                    rows[0].name = answer.name
                self.engine.submit(*rows)
        except InputError:
            ticket.leave()
            raise
        if stream:
            return Stream(ticket, answer)  # type: ignore[return-value]
        watching = asyncio.create_task(ticket.watch(request.receive))
        try:
            while not answer.done:
                pieces = await ticket.take()
                if not pieces:
                    raise ClientDisconnect
                if (error := _error_in(pieces)) is not None:
                    return _refused(error)
                answer.add(pieces)
        finally:
            ticket.leave()
            watching.cancel()
        return _json(answer.whole())

    def _deliver(self, pieces: list[tuple[Row, Piece]]) -> None:
        """Hand pieces to the event loop, from the engine's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_put, pieces)


class Stream:
    """An answer in pieces: server-sent events, each with all new pieces."""

    def __init__(self, ticket: Ticket, answer: Answer) -> None:
        self.ticket, self.answer = ticket, answer
        self.status_code, self.background = 200, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces as they come; an error after the beginning is the last event."""
        ticket, answer = self.ticket, self.answer
        watching = asyncio.create_task(ticket.watch(receive))
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        try:
            pieces = await ticket.take()
            if pieces and (error := pieces[0][1].error) is not None:
                await _refused(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _send(send, answer.begin())
            while pieces:
                if (error := _error_in(pieces)) is not None:
                    await _send(send, [("error", {"error": _error(error)[1]})])
                    break
                await _send(send, answer.add(pieces))
                if answer.done:
                    break
                pieces = await ticket.take()
            await send({"type": "http.response.body", "body": answer.last, "more_body": False})
        except (OSError, asyncio.CancelledError):
            pass  # the client has left, or does not read while the server ends
        finally:
            ticket.leave()
            watching.cancel()


def _error_in(pieces: Iterable[tuple[int, Piece]]) -> Exception | None:
    return next((piece.error for _, piece in pieces if piece.error is not None), None)


class _Guard:
    """Checks host and key of every request but for ``/health``, and counts the answers."""

    def __init__(self, app: Callable[..., Any], service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in _PATHS else "other"
                self.service.metrics.answered(path, message["status"])
            await send(message)

        scope["stateline"] = held = {"body": 0}
        try:
            refused = None if scope["path"] == "/health" else self._refusal(dict(scope["headers"]))
            await (refused or self.app)(scope, receive, counted)
        finally:
            self.service.bodies -= held["body"]

    def _refusal(self, headers: dict[bytes, bytes]) -> Response | None:
        """The answer to a request that has the wrong host or key."""
        service, host = self.service, headers.get(b"host", b"localhost").decode("latin-1")
        if service.local and not is_local(host):
            return _refused(HTTPException(403, f"this server is local: it has no name {host:.100}"))
        key, given = service.key, headers.get(b"authorization", b"")
        if key is not None and not secrets.compare_digest(given, b"Bearer " + key.encode()):
            return _refused(HTTPException(401, "the key is missing or wrong"))
        return None


_PATHS = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/metrics"}
_PATHS |= {"/health"}


def is_local(host: str) -> bool:
    """Whether a host, which may have a port, is a name or an address of this machine.

    Example:
        >>> [is_local(host) for host in ("localhost:80", "[::1]:80", "127.0.0.1", "evil.example")]
        [True, True, True, False]
    """
    name = host.rpartition("]")[0].strip("[") or host.partition(":")[0]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


def _put(pieces: Iterable[tuple[Row, Piece]]) -> None:
    for row, piece in pieces:
        row.put(piece)


async def _send(send: Send, events: Iterable[tuple[str, Any]]) -> None:
    """Send events; events of completions have no names."""
    body = b""
    for name, event in events:
        body += f"event: {name}\n".encode() if name else b""
        body += b"data: " + _encoded(event) + b"\n\n"
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _json(value: Any, status: int = 200) -> Response:
    return Response(_encoded(value), status, media_type="application/json")


def _encoded(value: Any) -> bytes:
    """JSON; bytes that are not UTF-8, such as in a repeated part of a request, become U+FFFD."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return printable(json.dumps(value, ensure_ascii=False)).encode()


def _error(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status of an error, and the JSON that describes it."""
    if isinstance(error, HTTPException):
        status, line = error.status_code, str(InputError(error.detail))
        if status == 405:
            line = "this path takes another method"
        elif error.detail == HTTPStatus(status).phrase:
            line = (
                "there is nothing at this path: POST to /v1/completions, /v1/chat/completions or "
            )
            line += "/v1/responses"
    elif isinstance(error, InputError):
        status, line = getattr(error, "status", 400), str(error)
    elif isinstance(error, ClientDisconnect):
        status, line = 499, "the client has left"
    else:
        status, line = 500, "the server has failed; its log says why"
    sort = "invalid_request_error" if status < 500 else "server_error"
    param = getattr(error, "param", None)
    return status, {"message": line, "type": sort, "param": param, "code": status}


def _refused(error: Exception) -> Response:
    status, described = _error(error)
    return _json({"error": described}, status)


async def _refusal(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return _refused(error)
