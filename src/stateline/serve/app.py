"""The HTTP side: routes, keys, streams, and one line for every error."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from stateline.data import Tokenizer
from stateline.errors import InputError
from stateline.generate import PrefixStates
from stateline.serve.engine import Engine, Limits, Piece, Row
from stateline.serve.metrics import Metrics
from stateline.serve.replies import Answer, CompletionAnswer, ResponseAnswer, printable
from stateline.serve.requests import CompletionRequest, ResponseRequest, decode

_encode = msgspec.json.Encoder().encode


@dataclass(eq=False)
class Ticket:
    """The pieces of one text on their way from the engine to its client."""

    row: Row
    pieces: list[Piece] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.row.put = self.put

    def put(self, piece: Piece) -> None:
        """Add a piece, in the event loop's thread."""
        self.pieces.append(piece)
        self.news.set()

    async def take(self) -> list[Piece]:
        """Wait for new pieces and return them; empty once the client has left."""
        await self.news.wait()
        if not self.row.left:
            self.news.clear()
        pieces, self.pieces = self.pieces, []
        return pieces

    async def watch(self, receive: Receive) -> None:
        """Wait until the client leaves; the row then leaves before the next step."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.row.left = True
        self.news.set()


def make_app(
    prefixes: PrefixStates,
    tokenizer: Tokenizer,
    name: str,
    *,
    limits: Limits | None = None,
    key: str | None = None,
) -> Starlette:
    """The application that serves a model.

    Args:
        prefixes: Kept states of the model; those with a folder outlive the process.
        tokenizer: The model's tokenizer.
        name: Name of the model for clients.
        limits: Limits for the requests of clients.
        key: What clients must send as ``Authorization: Bearer KEY``; by default nothing.

    Returns:
        A Starlette application, whose engine runs from its start-up to its shutdown.
    """
    service = Service(prefixes, tokenizer, name, limits or Limits(), key)
    routes = [
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/responses", service.responses, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.models),
        Route("/metrics", service.show_metrics),
        Route("/health", service.health),
    ]
    handlers: Any = dict.fromkeys((InputError, HTTPException, ClientDisconnect), _refusal)
    app = Starlette(routes=routes, lifespan=service.lifespan, exception_handlers=handlers)
    app.state.service = service
    app.add_middleware(_KeyMiddleware, service=service)
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
    ) -> None:
        self.name, self.limits, self.key = name, limits, key
        self.tokenizer, self.metrics, self._began = tokenizer, Metrics(), int(time.time())
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
        given, row = await self._read(request, CompletionRequest)
        usage = given.stream_options is not None and given.stream_options.include_usage
        told = given.logprobs is not None
        answer = CompletionAnswer(self.name, self.tokenizer, told, usage, row.tokens)
        return await self._answer(request, row, answer, stream=given.stream)

    async def responses(self, request: Request) -> Response:
        """``POST /v1/responses``."""
        given, row = await self._read(request, ResponseRequest)
        answer = ResponseAnswer(self.name, given)
        return await self._answer(request, row, answer, stream=given.stream)

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

    async def _read(self, request: Request, kind: Any) -> tuple[Any, Row]:
        """The request, checked, and its row."""
        sort = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if sort != "application/json":  # so that pages of other sites cannot send requests
            raise HTTPException(415, f"the content type must be application/json, got {sort!r}")
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > self.limits.body:
                raise HTTPException(413, f"a request may have at most {self.limits.body} bytes")
        given = decode(b"".join(parts), kind)
        self._check_name(given.model)
        return given, await asyncio.to_thread(given.row, self.tokenizer)

    def _check_name(self, name: str) -> None:
        if name != self.name:
            raise HTTPException(404, f"there is no model {name[:100]!r}: this is {self.name!r}")

    async def _answer(
        self, request: Request, row: Row, answer: Answer, *, stream: bool
    ) -> Response:
        ticket = Ticket(row)
        if stream:
            row.name = answer.name
        self.engine.submit(row)
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
            row.left = True
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
            if pieces and (error := pieces[0].error) is not None:
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
            ticket.row.left = True
            watching.cancel()


def _error_in(pieces: Iterable[Piece]) -> Exception | None:
    return next((piece.error for piece in pieces if piece.error is not None), None)


class _KeyMiddleware:
    """Checks the key of every request but for ``/health``, and counts the answers."""

    def __init__(self, app: Callable[..., Any], service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = {"/v1/completions", "/v1/responses", "/v1/models", "/metrics", "/health"}
                path = scope["path"] if scope["path"] in known else "other"
                self.service.metrics.answered(path, message["status"])
            await send(message)

        key = None if scope["path"] == "/health" else self.service.key
        given = dict(scope["headers"]).get(b"authorization", b"")
        if key is not None and not secrets.compare_digest(given, b"Bearer " + key.encode()):
            refusal = _refused(HTTPException(401, "the key is missing or wrong"))
            await refusal(scope, receive, counted)
            return
        await self.app(scope, receive, counted)


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
            line = "there is nothing at this path: POST texts to /v1/completions or /v1/responses"
    elif isinstance(error, InputError):
        status, line = getattr(error, "status", 400), str(error)
    elif isinstance(error, ClientDisconnect):
        status, line = 499, "the client has left"
    else:
        status, line = 500, "the server has failed; its log says why"
    sort = "invalid_request_error" if status < 500 else "server_error"
    return status, {"message": line, "type": sort, "param": None, "code": status}


def _refused(error: Exception) -> Response:
    status, described = _error(error)
    return _json({"error": described}, status)


async def _refusal(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return _refused(error)
