"""An httpx transport that sends requests to an ASGI app through Baton's own HTTP server, over
socket pairs.

Tests that use it need no port, but run the same code as production, starting with
:class:`router.http.connection.HttpConnection`.
"""

import asyncio
import select
import socket
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx
from starlette.types import ASGIApp

from baton.clock import SystemClock
from router.http.server import HttpServer

Address = tuple[str, int]
LOCAL_CLIENT: Address = ("127.0.0.1", 50_000)


class HttpServerTransport(httpx.AsyncHTTPTransport):
    """Serves ``app`` to one :class:`httpx.AsyncClient`. Closing the client closes the server.
    ``client`` is the client's address, as the server sees it."""

    def __init__(self, app: ASGIApp, client: Address = LOCAL_CLIENT) -> None:
        super().__init__()
        self._server = HttpServer(app, SystemClock())
        backend = SocketPairBackend(self._server, client)
        self._pool = httpcore.AsyncConnectionPool(network_backend=backend)

    async def aclose(self) -> None:
        await super().aclose()
        await self._server.close()


class SocketPairBackend(httpcore.AsyncNetworkBackend):
    """Connects to the server through one end of a socket pair, whatever address is requested."""

    def __init__(self, server: HttpServer, client: Address) -> None:
        self._server = server
        self._client = client

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        near, far = socket.socketpair()
        near.setblocking(False)
        self._server.accept(_SocketFrom(far, self._client), self._client[0])
        return SocketStream(near)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SocketStream(httpcore.AsyncNetworkStream):
    """A connected socket. A server that refuses a request may close the connection before it has
    read the whole request. Through this class, its response can still be read; asyncio's streams
    would lose the response."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, max_bytes)
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, buffer)
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        """If ``info`` is ``is_readable``, return whether the socket is readable; httpcore uses this
        to recognize an idle connection that the server has closed. Otherwise, return None."""
        if info == "is_readable":
            # poll, not select: a test process may have more than 1,024 open files
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        return None


class _SocketFrom(socket.socket):
    """A socket that reports ``peer`` as its peer's address, because a socket pair has no
    addresses."""

    def __init__(self, end: socket.socket, peer: Address) -> None:
        super().__init__(fileno=end.detach())
        self._peer = peer

    def getpeername(self) -> Address:
        return self._peer
