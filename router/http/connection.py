"""One HTTP connection: uvicorn's, with a bound on everything that a client can send or not read.

What uvicorn leaves open is closed here: how large a request's head may be and how long it may take,
requests that come before the one in front was answered, bodies of requests that were answered
without them, and readers that don't read.

llhttp is fed one request at a time, cut where its head or its body ends. So the head is at hand as
it came (:mod:`router.http.request_head` checks it), what a body has beside its data is counted, and
what comes behind it waits as bytes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from router.errors import ApiError
from router.http.chunked_body import ChunkedBodyScanner
from router.http.request_head import INVALID_HTTP, RequestHead, parse_request_head
from router.http.response_writer import INLINE_WRITER_KEY

MAX_TARGET_BYTES = 8192
"""Of a request's target. The API's own have less than a hundred."""

MAX_PIPELINED_BYTES = 64 * 1024
"""Of further requests, before the answer to the first."""

EMPTY_LINE = b"\r\n\r\n"
"""Ends a head."""

MULTIPART_OVERHEAD_BYTES = 64 * 1024
"""Around an upload."""

LINGER_SECONDS = 5.0
"""For the rest of a body that nobody wants any more: a connection that is closed on it may lose the
answer on its way."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int = 16_384
    max_header_bytes: int = 32 * 1024
    max_headers: int = 100
    max_body_bytes: int = 8 * 1024 * 1024
    max_file_bytes: int = 0
    """Of an upload, which may be longer than other bodies: who is refused reads why, if it sends
    no more than that."""
    header_seconds: float = 10.0
    keep_alive_seconds: float = 75.0
    write_seconds: float = 30.0

    @property
    def max_discarded_bytes(self) -> int:
        """Of a body that is not wanted any more."""
        return max(self.max_body_bytes, self.max_file_bytes + MULTIPART_OVERHEAD_BYTES)


class UvicornBodyWriter:
    """Into one response's body, as uvicorn's ``send`` writes it when nothing holds it up."""

    __slots__ = ("_cycle", "on_leave")

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self.on_leave: Callable[[], None] | None = None

    @property
    def has_left(self) -> bool:
        return bool(self._cycle.disconnected)

    @property
    def is_open(self) -> bool:
        cycle = self._cycle
        is_at_body = cycle.response_started and not cycle.response_complete
        is_read = not (cycle.disconnected or cycle.flow.write_paused)
        return is_at_body and is_read and cycle.chunked_encoding is True

    def write(self, data: bytes) -> None:
        """A chunk of its own: an empty one would end the body."""
        if data:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _rejection_reason(problem: ApiError) -> str:
    if problem.code == INVALID_HTTP:
        return "http"
    return "body" if problem.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else "headers"


def _notify_disconnect(push: UvicornBodyWriter | None) -> None:
    if push is not None and push.on_leave is not None:
        push.on_leave()


class Http10BodySender:
    """A cycle's ``send`` for HTTP/1.0, which has no chunks: a body whose length nobody knows ends
    with the connection."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._is_open_ended = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._is_open_ended = b"content-length" not in names
            if self._is_open_ended:
                self._cycle.chunked_encoding = False
        elif self._is_open_ended:  # uvicorn counts down
            ends = not message.get("more_body", False)
            size = len(message.get("body", b""))
            self._cycle.expected_content_length = size if ends else size + 1
        await self._send(message)


class BodyParserCallbacks:
    """What a parser calls that reads the rest of a message whose head was read by another."""

    def __init__(self, connection: "HttpConnection") -> None:
        self._connection = connection
        self._in_body = False
        self.on_body = connection.on_body

    def on_message_complete(self) -> None:
        self._connection.renew_parser()
        self._connection.on_message_complete()

    def on_headers_complete(self) -> None:
        self._in_body = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            self._connection.on_header(name, value)


class HttpConnection(HttpToolsProtocol):
    """``on_refusal`` is told in one word which bound a client overstepped.

    A message is idle (none is coming), in its head, in its body, or whole. uvicorn's ``cycle`` is
    the newest one whose head was whole, with its answer. While that is under way, what comes behind
    its request is kept unparsed, so uvicorn's ``pipeline`` stays empty.
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        limits: ConnectionLimits,
        on_refusal: Callable[[str], None],
    ) -> None:
        super().__init__(config, state, {})
        self._limits = limits
        self._on_refusal = on_refusal
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._in_message = False
        self._has_head = False
        self._is_upgrade = False
        self._is_last = False
        self._num_messages = 0
        self._num_trailers = 0
        self._head = b""  # as it came so far
        self._tail = b""  # the last bytes before what comes: an empty line may have begun in them
        self._body_left = 0  # where it does not come in chunks
        self._chunks: ChunkedBodyScanner | None = None
        self._discarded_bytes = 0
        self._ahead = bytearray()
        self._problem: ApiError | None = None

    @property
    def is_fresh(self) -> bool:
        """Nothing was asked yet."""
        return self._num_messages == 0

    def shutdown(self) -> None:
        """Closes it, after what is under way."""
        self._is_last = True
        if self._is_answering or self._in_body:
            self.cycle.keep_alive = False
        elif not self._in_message:
            self.transport.close()
            self._await_flush()

    # -- the transport calls --------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse("connections", ApiError(503, "too many connections", code="overloaded"))
        else:
            self._arm(self._limits.header_seconds)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        start = 0
        while start < len(data) and not self.transport.is_closing():
            if self._is_answering:
                self._keep(data[start:])
                return
            start = self._parse(data, start)
        if self._head and self._timer is None and not self.transport.is_closing():
            self._arm(self._limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._disarm_write()
        self._unset_keepalive_if_required()
        self._drop_request()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm_write()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm_write()

    # -- the parser calls -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self._num_messages += 1
        self._num_trailers = self._discarded_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are dropped: no header appears after it was looked for."""
        if not self._has_head:
            self.headers.append((name.lower(), value))
            return
        self._num_trailers += 1
        if self._num_trailers > self._limits.max_headers:
            self._fail(self._too_large())

    def on_headers_complete(self) -> None:
        head = self._check_head()
        self._has_head = True
        self._is_upgrade = self.parser.should_upgrade()
        self._body_left = head.length or 0
        self._chunks = ChunkedBodyScanner() if head.length is None else None
        self._disarm()
        super().on_headers_complete()
        if self._is_last:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > self._limits.max_discarded_bytes:
                self._abort("body")

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return  # llhttp takes the body for another protocol's
        super().on_message_complete()
        if self._num_trailers:
            self.renew_parser()  # llhttp takes "connection: close" for a header's
        self._in_message = self._has_head = False
        self._head, self._chunks = b"", None
        if self.cycle.response_complete:
            self._disarm()
            self.timeout_keep_alive_task = self.loop.call_later(
                self._limits.keep_alive_seconds, self.timeout_keep_alive_handler
            )

    def renew_parser(self) -> None:
        """Read what comes next without anything that was read before."""
        self.parser = httptools.HttpRequestParser(self)

    # -- uvicorn calls --------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        cycle.scope[INLINE_WRITER_KEY] = UvicornBodyWriter(cycle)
        if cycle.scope["http_version"] == "1.0":
            cycle.send = Http10BodySender(cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_flush()
        elif self._in_body:
            if self.cycle.response_complete:
                self._arm(LINGER_SECONDS)
        elif not self._is_answering:
            if self._ahead:
                data, self._ahead = bytes(self._ahead), bytearray()
                self.data_received(data)
            else:
                self._forget()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._await_flush()

    def send_400_response(self, msg: str) -> None:
        problem = self._problem or ApiError(
            400, f"this is no HTTP/1.1 request: {msg}", code=INVALID_HTTP
        )
        answer = self.cycle
        if answer is not None and answer.response_started and not answer.response_complete:
            self._abort("http")
        else:
            self._refuse(_rejection_reason(problem), problem)

    # -- parts ----------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        """The newest request is whole, and its answer is not."""
        cycle = self.cycle
        return cycle is not None and not (cycle.response_complete or cycle.more_body)

    @property
    def _in_body(self) -> bool:
        return self._in_message and self._has_head

    def _parse(self, data: bytes, start: int) -> int:
        """Parse what comes of one message at most; return where the rest begins."""
        if not self._in_body:
            end = self._end_of_head(data, start)
            self._feed_head(data[start:end])
            return end
        if self._chunks is None:
            assert self._body_left, "llhttp has counted another length"
            end = min(start + self._body_left, len(data))
            self._body_left -= end - start
        else:
            try:
                end = self._chunks.scan(data, start)
            except ApiError as problem:
                self._problem = problem
                self.send_400_response(str(problem))
                return len(data)
        self._feed(data[start:end])
        return end

    def _end_of_head(self, data: bytes, start: int) -> int:
        """Where its empty line ends, which may have begun in what came before."""
        tail, most = self._tail, len(EMPTY_LINE) - 1
        if tail:
            found = (tail + data[start : start + most]).find(EMPTY_LINE)
            if found >= 0:
                self._tail = b""
                return start + found + len(EMPTY_LINE) - len(tail)
        found = data.find(EMPTY_LINE, start)
        if found >= 0:
            self._tail = b""
            return found + len(EMPTY_LINE)
        self._tail = (tail + data[max(start, len(data) - most) :])[-most:]
        return len(data)

    def _feed_head(self, piece: bytes) -> None:
        self._head += piece
        if len(self._head) > self._limits.max_header_bytes:
            self._refuse("headers", self._too_large())
            return
        self._feed(piece)
        if self._has_head:
            self._head = b""

    def _feed(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._ignore_upgrade()
        except httptools.HttpParserCallbackError:
            self.send_400_response("its target or a length can't be read")
        except httptools.HttpParserError as error:
            self.send_400_response(str(error))

    def _ignore_upgrade(self) -> None:
        """Read the body as HTTP/1.1 has it, by a parser that does not know of the offer."""
        self._is_upgrade = False
        framing = [
            b"%b: %b\r\n" % (name, value)
            for name, value in self.headers
            if name in (b"content-length", b"transfer-encoding")
        ]
        self.parser = httptools.HttpRequestParser(BodyParserCallbacks(self))
        self._feed(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")

    def _check_head(self) -> RequestHead:
        """Raises Problem."""
        if len(self.headers) > self._limits.max_headers:
            self._fail(self._too_large())
        if len(self.url) > MAX_TARGET_BYTES:
            self._fail(ApiError(414, f"the path has more than {MAX_TARGET_BYTES} bytes"))
        try:
            head = parse_request_head(self._head, self.headers)
        except ApiError as problem:
            self._fail(problem)
        self.url = head.target
        self.expect_100_continue = head.waits_for_100
        if head.authority:
            self.headers[:] = [each for each in self.headers if each[0] != b"host"]
            self.headers.append((b"host", head.authority))
        return head

    def _keep(self, data: bytes) -> None:
        self._ahead += data
        if len(self._ahead) > MAX_PIPELINED_BYTES:
            self._abort("ahead")

    def _forget(self) -> None:
        """An idle connection keeps nothing of the last request: half of its memory."""
        if not self._in_message:
            self.scope = self.cycle.scope = {}  # type: ignore[typeddict-item]
            self.headers = []

    def _too_large(self) -> ApiError:
        limits = self._limits
        bound = f"{limits.max_headers} headers and {limits.max_header_bytes} bytes of them"
        return ApiError(431, f"a request has at most {bound}", code="headers_too_large")

    def _fail(self, problem: ApiError) -> NoReturn:
        """Ends the parsing; uvicorn then asks for :meth:`send_400_response`."""
        self._problem = problem
        raise problem

    def _refuse(self, reason: str, problem: ApiError) -> None:
        """Answer instead of the app, which is told that its client has left."""
        self._on_refusal(reason)
        self._drop_request()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        data = problem.json
        self.transport.write(STATUS_LINE[problem.status] + head % len(data) + data)
        self.transport.close()
        self._await_flush()

    def _drop_request(self) -> None:
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            _notify_disconnect(cycle.scope.get(INLINE_WRITER_KEY))

    def _abort(self, reason: str) -> None:
        if not self.transport.is_closing():
            self._on_refusal(reason)
        self._drop_request()
        self.transport.abort()

    def _await_flush(self) -> None:
        """What was written goes out before it closes, if the client reads it."""
        self._disarm()
        if self.transport.get_write_buffer_size():
            self._arm_write()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._on_late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late(self) -> None:
        """A head, or a body that nobody reads, has not come in time."""
        self._timer = None
        if self._in_body:
            self._abort("body")
        elif self._in_message:
            seconds = self._limits.header_seconds
            problem = ApiError(408, f"the headers did not arrive within {seconds:g} s")
            self._refuse("slow", problem)
        else:
            self._on_refusal("slow")
            self.transport.close()
            self._await_flush()

    def _arm_write(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_seconds, self._on_stall)

    def _disarm_write(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _on_stall(self) -> None:
        self._write_timer = None
        self._on_refusal("unread")
        self.transport.abort()
