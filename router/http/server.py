"""The HTTP server: uvicorn's protocol on sockets and an event loop that the router creates."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from email.utils import formatdate
from functools import partial
from typing import Any, cast

from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.server import ServerState

from baton.clock import Clock
from baton.errors import Unavailable
from router.http.acceptor import Acceptor
from router.http.connection import HttpConnection
from router.http.connection_limits import ConnectionLimits
from router.http.idle_connections import IdleConnection, choose_to_close
from router.limits import ACCEPTS_PER_ITERATION, NOTSENT_LOWAT_BYTES

BACKLOG = 2048
DATE_REFRESH_SECONDS = 1.0
FIRST_REQUEST_GRACE_SECONDS = 1.0
"""How long a draining server waits for the first request on a connection that has had none."""

ROOM_DIVISOR = 64
"""A server with too many connections closes a 64th of them at once, because it looks at all of them
to choose these."""

CLOSE_TIMEOUT_SECONDS = 1.0
POLL_SECONDS = 0.02


class HttpServer:
    """Serves one or more sockets: call :meth:`listen` for each socket, run :meth:`run`
    concurrently, and call :meth:`close` at the end. The server does not handle signals. It ignores
    forwarding headers (such as ``x-forwarded-for``), since the admin API trusts clients by their
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
        self._opening: dict[asyncio.Task[None], IdleConnection] = {}
        self._acceptor = Acceptor(self.accept, self._max_waiting, lambda: on_refusal("connections"))
        self._update_date()

    def set_max_body_bytes(self, max_body_bytes: int) -> None:
        """Change the limit on request bodies for connections that are opened from now on."""
        self._limits = replace(self._limits, max_body_bytes=max_body_bytes)

    @property
    def num_connections(self) -> int:
        return len(self._state.connections)

    def listen(self, listener: socket.socket) -> None:
        """Accept connections, including those already queued. The server closes the socket when it
        stops."""
        self._acceptor.listen(listener)

    async def run(self) -> None:
        """Keep the ``date`` header of responses current, until cancelled."""
        while True:
            self._update_date()
            await self._clock.sleep(DATE_REFRESH_SECONDS)

    def stop_accepting(self, listener: socket.socket) -> None:
        """Stop accepting from ``listener``, after accepting all connections in its queue."""
        self._acceptor.stop(listener)

    def accept(self, connection: socket.socket, network: str) -> None:
        """Serve a connection from ``network``, and close its socket when it ends. If there are too
        many connections, first close idle ones."""
        if self._num_open >= self._limits.max_connections:
            self._make_room()
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._open(connection, network))
        deadline = loop.time() + self._limits.header_timeout_seconds
        self._opening[task] = IdleConnection(network, deadline, partial(self._give_up, task))
        task.add_done_callback(partial(self._end_opening, connection))

    async def drain(self) -> None:
        """Return when no request is in progress. Connections close after their current request. A
        connection that has had no request yet has a second to send one."""
        for connection in self._connections:
            if not connection.has_no_requests:
                connection.shutdown()
        await self._clock.sleep(FIRST_REQUEST_GRACE_SECONDS)
        for connection in self._connections:
            connection.shutdown()
        while self._state.tasks:
            await self._clock.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Close all sockets and connections within about a second."""
        self._acceptor.close()
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
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

    @property
    def _num_open(self) -> int:
        return self.num_connections + len(self._opening)

    def _connection(
        self, network: str = "", on_open: Callable[[], object] = lambda: None
    ) -> HttpConnection:
        return HttpConnection(
            self._config, self._state, self._limits, self._on_refusal, network, on_open
        )

    async def _open(self, connection: socket.socket, network: str) -> None:
        """Open the connection; with TLS, this ends with the handshake."""
        on_open = partial(self._opening.pop, asyncio.current_task(), None)
        factory = partial(self._connection, network, on_open)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                factory, connection, **self._tls_arguments()
            )
        except OSError as error:  # TLS errors are OSErrors, too; the transport is closed
            error.with_traceback(None)  # else buffers in its frames wait for the gc

    def _end_opening(self, connection: socket.socket, opening: asyncio.Task[None]) -> None:
        self._opening.pop(opening, None)
        if opening.cancelled():
            connection.close()  # it has no transport yet if the task was cancelled before it began

    def _give_up(self, opening: asyncio.Task[None]) -> None:
        """End a TLS handshake, to make room for others."""
        del self._opening[opening]
        opening.cancel()
        self._on_refusal("connections")

    def _make_room(self) -> None:
        count = max(self._limits.max_connections // ROOM_DIVISOR, 1)
        for each in choose_to_close([*self._opening.values(), *self._idle()], count):
            each.close()

    def _idle(self) -> Iterator[IdleConnection]:
        for each in self._connections:
            deadline = each.idle_deadline
            if deadline is not None:
                yield IdleConnection(each.network, deadline, each.close_idle)

    def _max_waiting(self) -> int:
        return max(self._limits.max_connections - self._num_open, ACCEPTS_PER_ITERATION)

    def _tls_arguments(self) -> dict[str, Any]:
        if self._tls is None:
            return {}
        seconds = self._limits.header_timeout_seconds
        return {
            "ssl": self._tls,
            "ssl_handshake_timeout": seconds,
            "ssl_shutdown_timeout": CLOSE_TIMEOUT_SECONDS,
        }

    def _update_date(self) -> None:
        seconds = self._clock.wall_nanoseconds() / 1e9
        self._state.default_headers = [(b"date", formatdate(seconds, usegmt=True).encode())]


def open_listener(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Open a socket that queues connections until a server accepts them. Raises Unavailable.

    Connections inherit the socket's options: no delay for small writes (TCP_NODELAY), and little
    buffering of unsent data (TCP_NOTSENT_LOWAT).
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
        timeout_keep_alive=limits.keep_alive_timeout_seconds,  # type: ignore[arg-type]
    )
    config.load()
    # uvicorn would log a line for each invalid request, so that clients could flood the log. These
    # requests are answered and counted instead.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return config
