"""The HTTP server: uvicorn's protocol at sockets of ours, in our event loop."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Any, cast

from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.server import ServerState

from baton.clock import Clock
from baton.errors import Unavailable
from router.http.connection import ConnectionLimits, HttpConnection

BACKLOG = 2048
DATE_REFRESH_SECONDS = 1.0
FIRST_REQUEST_GRACE_SECONDS = 1.0
"""That a draining server gives a connection to ask its first question: it was there before."""

CLOSE_TIMEOUT_SECONDS = 1.0
POLL_SECONDS = 0.02
NOTSENT_LOWAT_BYTES = 64 * 1024
"""That the kernel takes of a connection beyond what its client has room for: who does not
read is noticed early, and thousands of them cost little memory."""

_QUEUE_IS_EMPTY = {errno.EAGAIN, errno.EWOULDBLOCK}


class HttpServer:
    """:meth:`listen` at one socket or several, :meth:`run` beside it, :meth:`close` in the end.
    Leaves signals to us, and believes no forwarding headers: the admin API judges clients by their
    address."""

    def __init__(
        self,
        app: ASGIApp,
        clock: Clock,
        limits: ConnectionLimits | None = None,
        on_refusal: Callable[[str], None] = lambda reason: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._clock = clock
        self._limits = limits or ConnectionLimits()
        self._on_refusal = on_refusal
        self._tls = tls
        self._config = _uvicorn_config(app, self._limits)
        self._state = ServerState()
        self._servers: dict[socket.socket, asyncio.Server] = {}
        self._note_date()

    @property
    def num_connections(self) -> int:
        return len(self._state.connections)

    async def listen(self, listener: socket.socket) -> None:
        """Takes connections, also those that wait already. The socket is closed with the server."""
        loop = asyncio.get_running_loop()
        self._servers[listener] = await loop.create_server(
            self._connection, sock=listener, backlog=BACKLOG, **self._tls_arguments()
        )

    async def run(self) -> None:
        """Keeps the date that answers carry. Until cancelled."""
        while True:
            self._note_date()
            await self._clock.sleep(DATE_REFRESH_SECONDS)

    async def leave(self, listener: socket.socket) -> None:
        """Takes nothing more from ``listener``, after all that its queue holds: what is left in the
        queue of a closed socket gets a reset, although others listen at the port."""
        loop, waiting = asyncio.get_running_loop(), _accept_pending(listener)
        self._close(listener)
        for each in waiting:
            await loop.connect_accepted_socket(self._connection, each, **self._tls_arguments())

    async def finish(self) -> None:
        """Returns when nobody is being answered. Each connection ends after what it is about, and
        who has not asked yet has a second to do so."""
        for connection in self._connections:
            if not connection.is_fresh:
                connection.shutdown()
        await self._clock.sleep(FIRST_REQUEST_GRACE_SECONDS)
        for connection in self._connections:
            connection.shutdown()
        while self._state.tasks:
            await self._clock.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Ends everything, within about a second."""
        for listener in list(self._servers):
            self._close(listener)
        for connection in self._connections:
            connection.shutdown()
        give_up_at = self._clock.monotonic() + CLOSE_TIMEOUT_SECONDS
        while self._state.connections and self._clock.monotonic() < give_up_at:
            await self._clock.sleep(POLL_SECONDS)
        for connection in self._connections:
            connection.transport.abort()
        for task in list(self._state.tasks):
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)

    @property
    def _connections(self) -> Sequence[HttpConnection]:
        return cast(Sequence[HttpConnection], list(self._state.connections))

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._config, self._state, self._limits, self._on_refusal)

    def _close(self, listener: socket.socket) -> None:
        self._servers.pop(listener).close()
        listener.close()

    def _tls_arguments(self) -> dict[str, Any]:
        if self._tls is None:
            return {}
        seconds = self._limits.header_seconds
        return {
            "ssl": self._tls,
            "ssl_handshake_timeout": seconds,
            "ssl_shutdown_timeout": CLOSE_TIMEOUT_SECONDS,
        }

    def _note_date(self) -> None:
        seconds = self._clock.wall_nanoseconds() / 1e9
        self._state.default_headers = [(b"date", formatdate(seconds, usegmt=True).encode())]


def open_listener(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Connections wait in its queue until a server takes them. Raises Unavailable.

    What is set here, each connection inherits: it sends at once, and buffers little.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server(
            (host, port), family=family, backlog=BACKLOG, reuse_port=reuse_port
        )
    except OSError as error:
        raise Unavailable(f"can't listen on {host}:{port}: {error.strerror or error}") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
    return listener


def _accept_pending(listener: socket.socket) -> list[socket.socket]:
    waiting: list[socket.socket] = []
    listener.setblocking(False)
    while True:
        try:
            waiting.append(listener.accept()[0])
        except OSError as error:
            if error.errno in _QUEUE_IS_EMPTY:
                return waiting
            if error.errno != errno.ECONNABORTED:
                raise


def _uvicorn_config(app: ASGIApp, limits: ConnectionLimits) -> Config:
    config = Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        loop="none",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.keep_alive_seconds,  # type: ignore[arg-type]
    )
    config.load()
    # What clients do wrong is counted and answered; a line each would be theirs to flood.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return config
