"""A small HTTP/1.1 client: one request at a time per connection, with streamed responses.

The load generator uses it instead of a general client, since it must use much less CPU than the
server that it measures.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from baton.clock import Clock
from load_generator.request import (
    CONNECTION_LOST,
    MALFORMED,
    UNREACHABLE,
    BenchRequest,
    RequestError,
)
from load_generator.target import BenchTarget

CONNECT_SECONDS = 10.0


class ClientConnection(asyncio.Protocol):
    """One connection to the server. ``on_free`` is called when the connection can send the next
    request. ``on_retry`` is called with a request that must be sent again because the server had
    closed this reused connection before it sent any data in response."""

    def __init__(
        self,
        clock: Clock,
        on_free: Callable[["ClientConnection"], None],
        on_retry: Callable[[BenchRequest, bytes], None],
    ) -> None:
        self._now = clock.monotonic
        self._on_free = on_free
        self._on_retry = on_retry
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._request: BenchRequest | None = None
        self._data = b""
        self._num_requests = 0
        self._has_received = False
        self.is_alive = False

    def send(self, call: BenchRequest, data: bytes) -> None:
        assert self._transport is not None and self._request is None
        self._request, self._data, self._has_received = call, data, False
        self._num_requests += 1
        self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_alive = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a bug in our callbacks
        except httptools.HttpParserError as error:
            self._fail(RequestError(0, MALFORMED, f"not an HTTP response: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """End the request in progress, if any. If the connection was reused and nothing was
        received, retry the request. If the answer's finish reason was received, complete the
        request, since a response of unknown length ends with its connection. Otherwise fail it."""
        self.is_alive = False
        call = self._request
        if call is None:
            return
        if not self._has_received and self._num_requests > 1:
            self._request = None
            self._on_retry(call, self._data)
        elif call.finish_reason:
            self._request = None
            call.complete(self._now())
        else:
            self._fail(
                RequestError(
                    call.status, CONNECTION_LOST, str(error or "the server closed the connection")
                )
            )

    # -- httptools -------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        if self._request is not None:
            self._request.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._request is not None:
            self._request.feed(data, self._now())

    def on_message_complete(self) -> None:
        call, self._request = self._request, None
        if call is None:
            return
        if not self._parser.should_keep_alive():
            self.is_alive = False
            self.close()
        elif self.is_alive:
            self._on_free(self)
        call.complete(self._now())

    def _fail(self, fault: RequestError) -> None:
        call, self._request = self._request, None
        if call is not None:
            call.fail(fault, self._now())


class ConnectionPool:
    """Connections to one server. Each request in flight has its own connection, so the caller must
    limit the number of requests."""

    def __init__(self, target: BenchTarget, clock: Clock) -> None:
        self._target = target
        self._clock = clock
        self._free: list[ClientConnection] = []
        self._busy: dict[BenchRequest, ClientConnection] = {}
        self._connecting: set[asyncio.Task[None]] = set()

    def send(self, call: BenchRequest, data: bytes) -> None:
        """Send a request on a free connection, or on a new one if none is free. Never raises an
        error: if the server can't be reached, the request fails."""
        call.sent_at = self._clock.monotonic()
        while self._free:
            connection = self._free.pop()
            if connection.is_alive:
                self._send_on(connection, call, data)
                return
        self._open(call, data)

    def abort(self, call: BenchRequest, fault: RequestError) -> None:
        """Fail the request, and close its connection."""
        connection = self._busy.pop(call, None)
        call.fail(fault, self._clock.monotonic())
        if connection is not None:
            connection.close()

    def close(self) -> None:
        for opening in self._connecting:
            opening.cancel()
        for connection in [*self._free, *self._busy.values()]:
            connection.close()

    def _send_on(self, connection: ClientConnection, call: BenchRequest, data: bytes) -> None:
        self._busy[call] = connection
        connection.send(call, data)

    def _open(self, call: BenchRequest, data: bytes) -> None:
        opening = asyncio.get_running_loop().create_task(self._connect(call, data))
        self._connecting.add(opening)
        opening.add_done_callback(self._connecting.discard)

    async def _connect(self, call: BenchRequest, data: bytes) -> None:
        target, loop = self._target, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    self._make_connection, target.host, target.port, ssl=target.tls
                )
        except (OSError, TimeoutError) as error:
            fault = RequestError(0, UNREACHABLE, _reason(error))
            call.fail(fault, self._clock.monotonic())
            return
        if call.has_ended:  # the request timed out while connecting
            self._release(connection)
        else:
            self._send_on(connection, call, data)

    def _make_connection(self) -> ClientConnection:
        return ClientConnection(self._clock, self._release, self._open)

    def _release(self, connection: ClientConnection) -> None:
        self._free.append(connection)

    def remove(self, call: BenchRequest) -> None:
        """Remove a request that has ended."""
        self._busy.pop(call, None)


def _reason(error: BaseException) -> str:
    """Describe why a connection failed. If several addresses were tried, describe the first
    failure."""
    if isinstance(error, TimeoutError) and not str(error):
        return f"no connection within {CONNECT_SECONDS:g} s"
    return str(getattr(error, "strerror", None) or error)
