"""One HTTP/1.1 request to the server, with the response's body as it arrives.

Each exchange has a connection of its own: closing it is how a request is cancelled, and a frozen
server can't hold up other requests. httptools parses, since a general client would cost more per
token than the rest of the worker.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from baton.core.server_api import FORWARDED_HEADERS, ForwardedHead
from baton.errors import BatonError, Invalid, Unavailable

CONNECT_SECONDS = 2.0
MAX_BODY_BYTES = 64 << 20
"""Limit of a body that is read as a whole: a model's metrics, or a held answer with logprobs."""

MAX_UNREAD_BYTES = 1 << 20
"""How much of a relayed answer waits for its client before the connection is not read any more."""

JSON_TYPE = "application/json"

OnBody = Callable[[bytes], None]
OnEnd = Callable[[str], None]
"""Called once with the reason why the response is incomplete, or an empty text."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens. ``path`` is the prefix of its paths, without a slash at the end."""

    host: str
    port: int
    path: str = ""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self.path}"

    def encode(self, method: str, path: str, body: bytes, content_type: str = JSON_TYPE) -> bytes:
        host = self.url.removeprefix("http://").partition("/")[0]
        return (
            f"{method} {self.path}{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
            f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode("latin-1") + body


def parse_address(url: str) -> ServerAddress:
    """Parse a server's URL, with or without ``/v1``. Raises Invalid unless it is an http URL with a
    host and a port."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise Invalid(f"{url}: {error}") from error
    if parts.scheme != "http" or not parts.hostname or port is None:
        raise Invalid(f"a server's URL must look like http://HOST:PORT, not {url!r}")
    return ServerAddress(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))


class HttpExchange(asyncio.Protocol):
    """One request and its response. ``on_body`` gets the body of a response with status 200 as it
    arrives. The body of another status is kept, and is in the reason that ``on_end`` gets."""

    def __init__(self, request: bytes, on_body: OnBody, on_end: OnEnd) -> None:
        self._request = request
        self._on_body = on_body
        self._on_end: OnEnd | None = on_end
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._refusal = bytearray()
        self.status = 0

    async def open(self, address: ServerAddress) -> None:
        """Connect, and send the request. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(lambda: self, address.host, address.port)
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"{address.url} can't be reached: {error or 'timed out'}") from error

    def abort(self) -> None:
        """Close the connection, which cancels the request; ``on_end`` is not called any more."""
        self._on_end = None
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)
        self._request = b""
        if self._on_end is None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._on_end is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._end(f"its response can't be read: {error.__context__!r}")
        except httptools.HttpParserError as error:
            self._end(f"not an HTTP response: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._end(str(error or "the server closed the connection"))

    # -- httptools -------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self.status == 200:
            self._on_body(data)
        elif len(self._refusal) < 4096:
            self._refusal += data

    def on_message_complete(self) -> None:
        refusal = self._refusal.decode(errors="replace")[:4096]
        self._end("" if self.status == 200 else f"status {self.status}: {refusal}")

    def _end(self, reason: str) -> None:
        on_end, self._on_end = self._on_end, None
        if self._transport is not None:
            self._transport.abort()
        if on_end is not None:
            on_end(reason)


class RelayedExchange(HttpExchange):
    """A request whose answer is read as it comes, whatever its status. Implements
    :class:`attached_worker.server.RelayedAnswer`."""

    def __init__(self, address: ServerAddress, request: bytes) -> None:
        super().__init__(request, self._receive, self._finish)
        self._address = address
        self._headers: dict[str, str] = {}
        self._has_head = False
        self._unread = bytearray()
        self._is_complete = False
        self._failure: BatonError | None = None
        self._changed = asyncio.Event()

    async def start(self) -> ForwardedHead:
        await self.open(self._address)
        while not self._has_head:
            await self._wait()
        return ForwardedHead(self.status, self._headers)

    async def body(self) -> AsyncGenerator[bytes]:
        while True:
            if self._unread:
                data = bytes(self._unread)
                self._unread.clear()
                if self._transport is not None and not self._is_complete:
                    self._transport.resume_reading()
                yield data
            elif self._is_complete:
                return
            else:
                await self._wait()

    def fail(self, error: BatonError) -> None:
        self._failure = self._failure or error
        self.abort()
        self._changed.set()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        await self._changed.wait()
        self._changed.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        known = name.decode("latin-1").lower()
        if known in FORWARDED_HEADERS:
            self._headers[known] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._has_head = True
        self._changed.set()

    def on_body(self, data: bytes) -> None:
        self._on_body(data)

    def on_message_complete(self) -> None:
        self._end("")

    def _receive(self, data: bytes) -> None:
        self._unread += data
        if len(self._unread) > MAX_UNREAD_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._changed.set()

    def _finish(self, reason: str) -> None:
        self._is_complete = not reason
        if reason:
            self._failure = Unavailable(f"the server broke off its answer: {reason}")
        self._changed.set()


async def fetch(
    address: ServerAddress,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    seconds: float | None = None,
    content_type: str = JSON_TYPE,
) -> bytes:
    """Return the body of a response with status 200. Raises Unavailable if the server can't be
    reached, fails (status 5xx), or does not respond within ``seconds``, and Invalid for another
    status."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    parts = bytearray()

    def receive(data: bytes) -> None:
        parts.extend(data)
        if len(parts) > MAX_BODY_BYTES:
            raise ValueError(f"more than {MAX_BODY_BYTES} bytes")

    exchange = HttpExchange(
        address.encode(method, path, body, content_type),
        receive,
        lambda reason: _set(ended, reason),
    )
    try:
        async with asyncio.timeout(seconds):
            await exchange.open(address)
            reason = await ended
    except TimeoutError as error:
        raise Unavailable(f"{address.url}{path} has not responded within {seconds:g} s") from error
    finally:
        exchange.abort()
    if reason and 200 < exchange.status < 500:
        raise Invalid(f"{address.url}{path}: {reason}")
    if reason:
        raise Unavailable(f"{address.url}{path}: {reason}")
    return bytes(parts)


def _set(future: "asyncio.Future[str]", reason: str) -> None:
    if not future.done():
        future.set_result(reason)
