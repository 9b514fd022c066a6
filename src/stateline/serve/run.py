"""Running an application: a socket, and a server that ends by a signal to the process."""

import asyncio
import socket

import uvicorn
from starlette.applications import Starlette

from stateline.errors import InputError

GRACE = 3
"""Seconds that running texts get when the server ends; their answers get one second more."""

IDLE = 75
"""Seconds after which an idle connection is closed; clients usually close it earlier."""


class _Server(uvicorn.Server):
    """Ends the texts that still run after ``GRACE``, so that every client gets an answer."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; called by uvicorn."""
        assert isinstance(self.config.app, Starlette)
        asyncio.get_running_loop().call_later(GRACE, self.config.app.state.service.engine.end)
        await super().shutdown(sockets)


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
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE + 1,
        timeout_keep_alive=IDLE,
    )
    return _Server(config)
