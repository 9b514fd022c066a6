"""Running an application: a socket, and a server that ends by a signal to the process."""

import asyncio
import resource
import socket

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from stateline.errors import InputError

GRACE = 3
"""Seconds that running texts get when the server ends; their answers get one second more."""

IDLE = 75
"""Seconds after which an idle connection is closed; clients usually close it earlier."""

ARRIVAL = 30
"""Seconds in which a request must arrive, and in which an answer must be read after its end."""

CONNECTIONS = 2048
"""Largest number of connections; at most half of the files that the process may open."""


class _Connection(H11Protocol):
    """A connection whose requests arrive in time, and which makes room for others.

    If there are too many connections, the one that has been without a whole request for the longest
    time is closed. So half-open connections do not keep clients away.
    """

    answering, since = False, 0.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection; called by asyncio."""
        super().connection_made(transport)
        self._wait(ARRIVAL)
        if len(self.connections) > connections():
            others = [
                one
                for one in self.connections
                if isinstance(one, _Connection) and not one.transport.is_closing()
            ]
            min(others, key=lambda one: (one.answering, one.since)).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take bytes; called by asyncio."""
        if self._deadline is None:  # the first bytes after an answer
            self._wait(ARRIVAL)
        super().data_received(data)
        if not self.answering and self.conn.their_state in (h11.DONE, h11.MUST_CLOSE):
            assert isinstance(self.config.app, Starlette)
            self.answering = True
            self._wait(self.config.app.state.service.limits.seconds + ARRIVAL)

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of this one; called by uvicorn."""
        if self.answering:
            self.answering, self.since = False, self.loop.time()
            self._stop()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; called by asyncio."""
        self._stop()
        super().connection_lost(exc)

    def _wait(self, seconds: float) -> None:
        self._stop()
        self.since = self.loop.time()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """Ends the texts that still run after ``GRACE``, so that every client gets an answer."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; called by uvicorn."""
        assert isinstance(self.config.app, Starlette)
        asyncio.get_running_loop().call_later(GRACE, self.config.app.state.service.engine.end)
        await super().shutdown(sockets)


def connections() -> int:
    """Largest number of connections."""
    return min(CONNECTIONS, _files() // 2)


def _files() -> int:
    """Files that the process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS * 2 if limit == resource.RLIM_INFINITY else limit


def listen(host: str, port: int) -> socket.socket:
    """A socket at which clients can connect; the port 0 takes a free one.

    Raises:
        InputError: If the port is out of range or cannot be used.
    """
    if not 0 <= port < 1 << 16:
        raise InputError(f"a port must be from 0 to 65535, got {port}")
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise InputError(
            f"cannot listen at {host}:{port}: {error.strerror}; give another one"
        ) from error


def make_server(app: Starlette) -> uvicorn.Server:
    """A server; ``run(sockets=[...])`` serves until a signal ends the process."""
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE + 1,
        timeout_keep_alive=IDLE,
        backlog=min(1024, _files() // 8),  # connections that are taken before any is closed
    )
    return _Server(config)
