"""Reads bounded bodies and writes responses through raw ASGI; clients may disconnect at any
time."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, cast

from starlette.types import Message, Receive, Scope, Send

from baton.concurrency.time_limit import TimeLimit
from router.errors import ApiError
from router.http.content_decoding import ENCODINGS, BodyDecompressor
from router.http.multipart import parse_boundary
from router.http.raw_body import RawBody
from router.limits import PIECE_BYTES

JSON_HEADERS = {"content-type": "application/json"}
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Without this header, some proxies (such as nginx) buffer what should arrive token by token.
    "x-accel-buffering": "no",
}
JSON_TYPE = "application/json"
FORM_TYPES = frozenset({"text/plain", "application/x-www-form-urlencoded"})
BROWSER_HEADERS = (b"origin", b"sec-fetch-site")

FIRST_BYTE_SECONDS = 4.0
"""A stream begins after this time, even if there is nothing to send yet, so that its client gets a
byte within 5 s. A request that fails earlier gets an HTTP error."""

PING_SECONDS = 10.0
"""The interval of pings in a stream. Many proxies close a connection on which nothing comes for 60
s."""

CLIENT_CLOSED_REQUEST = 499
MAX_LENGTH_DIGITS = 20
INLINE_WRITER_KEY = "baton.push"
"""The key in an ASGI scope of the :class:`InlineBodyWriter`, which
:class:`~router.http.connection.HttpConnection` always sets."""
REQUEST_ID_KEY = "baton.request_id"
"""The key of the request id in an ASGI scope, by which the client and the logs know the request."""


class ClientDisconnected(Exception):
    """The client has disconnected, so there is nobody to respond to."""


class InlineBodyWriter(Protocol):
    """Writes to the client's socket without waiting. ``on_disconnect`` is called when the client
    disconnects."""

    on_disconnect: Callable[[], None] | None

    @property
    def is_disconnected(self) -> bool: ...

    @property
    def is_open(self) -> bool:
        """Whether more of the body can be written now: the body has begun and has not ended, and
        the client has neither disconnected nor fallen behind in reading."""
        ...

    def write(self, data: bytes) -> None:
        """Write a part of the body. Call this only while ``is_open`` is True."""
        ...


class ResponseWriter:
    """Writes one response. ``status`` is 0 until the response has begun. ``inline_body`` writes
    parts of the body without waiting; a batch's requests have none."""

    def __init__(self, send: Send, inline_body: InlineBodyWriter | None = None) -> None:
        self._send = send
        self.inline_body = inline_body
        self.status = 0
        self._is_document = False
        self._ping_timer: asyncio.TimerHandle | None = None

    @property
    def has_started(self) -> bool:
        return self.status != 0

    async def start(
        self, status: int, headers: Mapping[str, str], *, is_document: bool = False
    ) -> None:
        """Begin a response. ``is_document`` says that it is no stream of events, to which an error
        could be added."""
        self.status, self._is_document = status, is_document
        await self._send(_start_message(status, headers))

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def start_pings(self, headers: dict[str, str], ping: bytes) -> None:
        """Keep a stream alive until the response ends or :meth:`stop_pings` is called. After
        :data:`FIRST_BYTE_SECONDS`, begin it, unless it has begun, and send ``ping``; then send
        ``ping`` every :data:`PING_SECONDS`. Other output does not delay a ping, so that pings cost
        no time per token."""
        loop = asyncio.get_running_loop()
        self._ping_timer = loop.call_later(FIRST_BYTE_SECONDS, self._send_ping, headers, ping)

    def _send_ping(self, headers: dict[str, str], ping: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._ping_timer = loop.call_later(PING_SECONDS, self._send_ping, headers, ping)
        start = _start_message(200, STREAM_HEADERS | headers)
        if not self.has_started and self._send_now(start):
            self.status = 200
        if self.has_started:
            self._send_now({"type": "http.response.body", "body": ping, "more_body": True})

    def stop_pings(self) -> None:
        if self._ping_timer is not None:
            self._ping_timer.cancel()
            self._ping_timer = None

    def _send_now(self, message: Message) -> bool:
        """Send a message, and return True. If the client does not keep up, so that the server would
        wait before it sends, send nothing and return False."""
        sending = cast(Coroutine[Any, Any, None], self._send(message))
        try:
            sending.send(None)
        except StopIteration:
            return True
        sending.close()
        return False

    async def end(self, data: bytes = b"") -> None:
        self.stop_pings()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def respond(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
        """Send a whole response. Returns when the client has read all of it but what fits into the
        connection's buffers, so that what the request holds bounds what waits for slow clients."""
        self.stop_pings()
        length = {"content-length": str(len(data))}
        await self.start(status, {**headers, **length}, is_document=True)
        await send_body(self._send, data)

    async def send_error(
        self, error: ApiError, headers: Mapping[str, str], encoder: "ErrorEncoder | None" = None
    ) -> None:
        """Send an error: as the response, or as the last event of a stream that has begun. Any
        other response that has begun can't become an error; the server closes its connection, since
        the response is not complete. Without ``encoder``, the error has OpenAI's form."""
        encoder = encoder or OpenAIErrorEncoder()
        if self.has_started and self._is_document:
            return
        if self.has_started:
            await self.end(encoder.encode_error_event(error))
        else:
            merged = {**JSON_HEADERS, **headers, **error.headers}
            await self.respond(error.status, merged, encoder.encode_error(error))


def _start_message(status: int, headers: Mapping[str, str]) -> Message:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


async def send_body(send: Send, data: bytes) -> None:
    """Send the whole body of a response whose length is known, as fast as the client reads it."""
    start_of_last = max(len(data) - 1, 0) // PIECE_BYTES * PIECE_BYTES
    for start in range(0, start_of_last, PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": data[start_of_last:], "more_body": False})


class ErrorEncoder(Protocol):
    """Encodes errors in the form of one API."""

    def encode_error(self, error: ApiError) -> bytes:
        """Return the body of an error response."""
        ...

    def encode_error_event(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails."""
        ...


class OpenAIErrorEncoder:
    """Encodes errors as OpenAI's API does."""

    def encode_error(self, error: ApiError) -> bytes:
        return error.json

    def encode_error_event(self, error: ApiError) -> bytes:
        return b"data: " + error.json + b"\n\n"


def get_header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


def content_length(scope: Scope) -> int:
    """Return the ``content-length`` header in bytes; 0 if it is missing or invalid."""
    length = get_header(scope, b"content-length")
    if length is None or not (length.isascii() and length.isdigit()):
        return 0
    return int(length[:MAX_LENGTH_DIGITS])


async def read_body(
    scope: Scope,
    receive: Receive,
    body: RawBody,
    max_bytes: int,
    seconds: float,
    *,
    is_form: bool = False,
) -> None:
    """Read the request's body into ``body``, decompressed: JSON, or a multipart form. Raises
    ApiError (400, 408, 413, 415), Overloaded or ClientDisconnected. Never holds more than
    ``max_bytes`` plus one ASGI message."""
    _check_headers(scope, max_bytes, is_form)
    decompressor = _decompressor(scope)
    try:
        with TimeLimit(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                data = message.get("body", b"")
                if decompressor is None:
                    _add_part(body, data, max_bytes)
                else:
                    await _add_decompressed(body, decompressor, data, max_bytes)
                if not message.get("more_body", False):
                    break
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s") from error
    if decompressor is not None:
        decompressor.finish()


async def _add_decompressed(
    body: RawBody, decompressor: BodyDecompressor, data: bytes, max_bytes: int
) -> None:
    for step in decompressor.decompress(data):
        _add_part(body, step, max_bytes)
        await asyncio.sleep(0)  # let other requests run between the steps
    if decompressor.num_compressed_bytes > max_bytes:
        raise _too_large(max_bytes)


def _add_part(body: RawBody, data: bytes, max_bytes: int) -> None:
    body.add(data)
    if body.size_bytes > max_bytes:
        raise _too_large(max_bytes)


async def cancel_on_disconnect(push: InlineBodyWriter, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` in the current task. If the client that ``push`` writes to disconnects, cancel
    ``work`` and raise ClientDisconnected."""
    task, has_left = asyncio.current_task(), push.is_disconnected
    assert task is not None

    def leave() -> None:
        nonlocal has_left
        if not has_left:
            has_left = True
            task.cancel()

    if has_left:
        work.close()
        raise ClientDisconnected
    push.on_disconnect = leave
    try:
        await work
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        push.on_disconnect = None


def _check_headers(scope: Scope, max_bytes: int, is_form: bool) -> None:
    kind = get_header(scope, b"content-type")
    if is_form:
        parse_boundary(kind)
    elif kind is not None and not _may_be_json(kind.split(";")[0].strip().lower(), scope):
        raise ApiError(415, f"content-type is {kind!r}; it must be application/json")
    if content_length(scope) > max_bytes:
        raise _too_large(max_bytes)


def _may_be_json(media_type: str, scope: Scope) -> bool:
    """Whether a body of this type is parsed as JSON. Some command-line clients send JSON with the
    types of forms. In a browser, such types let a page of another site send a request without a
    CORS preflight, so they are refused in requests with a header that only browsers send."""
    if media_type not in FORM_TYPES:
        return media_type == JSON_TYPE
    return all(get_header(scope, header) is None for header in BROWSER_HEADERS)


def _decompressor(scope: Scope) -> BodyDecompressor | None:
    encoding = get_header(scope, b"content-encoding")
    name = "identity" if encoding is None else encoding.strip().lower()
    if name in ENCODINGS:
        return BodyDecompressor()
    if name != "identity":
        message = f"content-encoding {encoding!r} is not supported; use gzip or deflate"
        raise ApiError(415, message)
    return None


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
