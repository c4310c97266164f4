"""A small HTTP/1.1 client: one request after the other on a connection, answers as they come.

It is there because a load generator must cost much less than what it measures.
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
    """``on_free`` is called when it can take the next request, ``on_retry`` with a call that a kept
    connection lost before anything came: the server had closed it."""

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
        self._call: BenchRequest | None = None
        self._data = b""
        self._num_calls = 0
        self._heard = False
        self.alive = False

    def send(self, call: BenchRequest, data: bytes) -> None:
        assert self._transport is not None and self._call is None
        self._call, self._data, self._heard = call, data, False
        self._num_calls += 1
        self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.alive = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a bug of ours
        except httptools.HttpParserError as error:
            self._fail(RequestError(0, MALFORMED, f"no HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """An answer without a length ends with its connection."""
        self.alive = False
        call = self._call
        if call is None:
            return
        if not self._heard and self._num_calls > 1:
            self._call = None
            self._on_retry(call, self._data)
        elif call.finish_reason:
            self._call = None
            call.complete(self._now())
        else:
            self._fail(
                RequestError(
                    call.status, CONNECTION_LOST, str(error or "the server closed the connection")
                )
            )

    # -- httptools -------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        if self._call is not None:
            self._call.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._call is not None:
            self._call.feed(data, self._now())

    def on_message_complete(self) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        if not self._parser.should_keep_alive():
            self.alive = False
            self.close()
        elif self.alive:
            self._on_free(self)
        call.complete(self._now())

    def _fail(self, fault: RequestError) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.fail(fault, self._now())


class ConnectionPool:
    """Connections to one server, as many as are needed at once. Not bounded here: whoever sends
    bounds what is under way."""

    def __init__(self, target: BenchTarget, clock: Clock) -> None:
        self._target = target
        self._clock = clock
        self._free: list[ClientConnection] = []
        self._busy: dict[BenchRequest, ClientConnection] = {}
        self._opening: set[asyncio.Task[None]] = set()

    def send(self, call: BenchRequest, data: bytes) -> None:
        """At once on a free connection, else on a new one. Never raises: what goes wrong is the
        call's."""
        call.sent_at = self._clock.monotonic()
        while self._free:
            connection = self._free.pop()
            if connection.alive:
                self._begin(connection, call, data)
                return
        self._open(call, data)

    def drop(self, call: BenchRequest, fault: RequestError) -> None:
        """Gives it up, and its connection."""
        connection = self._busy.pop(call, None)
        call.fail(fault, self._clock.monotonic())
        if connection is not None:
            connection.close()

    def close(self) -> None:
        for opening in self._opening:
            opening.cancel()
        for connection in [*self._free, *self._busy.values()]:
            connection.close()

    def _begin(self, connection: ClientConnection, call: BenchRequest, data: bytes) -> None:
        self._busy[call] = connection
        connection.send(call, data)

    def _open(self, call: BenchRequest, data: bytes) -> None:
        opening = asyncio.get_running_loop().create_task(self._connect(call, data))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _connect(self, call: BenchRequest, data: bytes) -> None:
        target, loop = self._target, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    self._connection, target.host, target.port, ssl=target.tls
                )
        except (OSError, TimeoutError) as error:
            fault = RequestError(0, UNREACHABLE, _reason(error))
            call.fail(fault, self._clock.monotonic())
            return
        if call.ended:  # given up meanwhile
            self._release(connection)
        else:
            self._begin(connection, call, data)

    def _connection(self) -> ClientConnection:
        return ClientConnection(self._clock, self._release, self._open)

    def _release(self, connection: ClientConnection) -> None:
        self._free.append(connection)

    def forget(self, call: BenchRequest) -> None:
        """It has ended."""
        self._busy.pop(call, None)


def _reason(error: BaseException) -> str:
    """Of several addresses that were tried, the first one's."""
    if isinstance(error, TimeoutError) and not str(error):
        return f"no connection within {CONNECT_SECONDS:g} s"
    return str(getattr(error, "strerror", None) or error)
