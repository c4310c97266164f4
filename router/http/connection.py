"""One HTTP connection: uvicorn's protocol class, with a bound on everything that a client can send
or leave unread.

uvicorn does not bound the following, so this module does: the size of a request's head and the time
until it is complete, pipelined requests, bodies that are still arriving after the response was
sent, and the time for which a client does not read.

uvicorn's parser (llhttp) is fed one request at a time, cut where the head or the body ends. So the
raw head is available for checks (:mod:`router.http.request_head`), chunk framing is counted, and
pipelined requests are kept as unparsed bytes.

Without these bounds, one client can block all others: docs/results/security.md shows the attacks
with and without them. Replacing uvicorn instead was not worthwhile: granian took as much CPU per
request, and a bare protocol of our own took only a sixth less (docs/decisions/11-router-http.md).
docs/results/router.md compares the cost of a request with other routers.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from router.errors import ApiError
from router.http.body_senders import Http10BodySender, UvicornBodyWriter
from router.http.chunked_body import ChunkedBodyScanner
from router.http.connection_limits import ConnectionLimits
from router.http.request_head import INVALID_HTTP, RequestHead, parse_request_head
from router.http.response_writer import INLINE_WRITER_KEY
from router.limits import MAX_PIPELINED_BYTES, MAX_TARGET_BYTES

HEAD_END = b"\r\n\r\n"
"""The end of a request's head."""

LINGER_SECONDS = 5.0
"""How long the rest of a request's body is read if the response, such as a refusal, was complete
before the body. If the connection were closed while the body arrives, the client might not get the
response."""


def _rejection_reason(problem: ApiError) -> str:
    if problem.code == INVALID_HTTP:
        return "http"
    return "body" if problem.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else "headers"


def _notify_disconnect(push: UvicornBodyWriter | None) -> None:
    if push is not None and push.on_disconnect is not None:
        push.on_disconnect()


class BodyParserCallbacks:
    """Callbacks of a second parser, which reads the body of a message whose head has been read by
    another parser (:meth:`HttpConnection._ignore_upgrade`)."""

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
    """One HTTP connection, with bounds on what its client can send or leave unread. If the client
    exceeds a bound, ``on_refusal`` is called with a word that names it, such as ``body``.
    ``network`` is the network that the client belongs to; ``on_open`` is called when the connection
    is open, with TLS after the handshake.

    The attribute ``cycle``, which is inherited from uvicorn, represents the newest request whose
    head is complete, and the response to it. From the end of this request until the end of its
    response, further bytes are kept unparsed, so uvicorn's ``pipeline`` stays empty.
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        limits: ConnectionLimits,
        on_refusal: Callable[[str], None],
        network: str = "",
        on_open: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(config, state, {})
        self.network = network
        self._on_open = on_open
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
        self._head = b""  # the part of the request's head that has arrived
        self._tail = b""  # the last bytes received: the empty line may begin in them
        self._remaining_body_bytes = 0  # bytes to come of a body that is not chunked
        self._chunks: ChunkedBodyScanner | None = None
        self._discarded_bytes = 0
        self._pipelined = bytearray()
        self._error: ApiError | None = None

    @property
    def has_no_requests(self) -> bool:
        """Whether the client has not begun a request on the connection yet."""
        return self._num_messages == 0

    @property
    def idle_deadline(self) -> float | None:
        """The event loop's time at which the connection will be closed if the head of a request
        isn't complete by then. None while a request is in progress."""
        timer = self._timer or self.timeout_keep_alive_task
        return None if self._is_answering or self._in_body or timer is None else timer.when()

    def close_idle(self) -> None:
        """Close the connection, which has no request in progress, to make room for others."""
        self.connections.discard(self)  # it no longer counts, though it is lost a moment later
        self._abort("connections")

    def shutdown(self) -> None:
        """Close the connection after the request in progress."""
        self._is_last = True
        if self._is_answering or self._in_body:
            self.cycle.keep_alive = False
        elif not self._in_message:
            self.transport.close()
            self._start_flush_timer()

    # -- called by the transport ----------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._on_open()
        if len(self.connections) > self._limits.max_connections:
            self._refuse("connections", ApiError(503, "too many connections", code="overloaded"))
        else:
            self._start_timer(self._limits.header_timeout_seconds)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        start = 0
        while start < len(data) and not self.transport.is_closing():
            if self._is_answering:
                self._buffer_pipelined(data[start:])
                return
            start = self._parse(data, start)
        if self._head and self._timer is None and not self.transport.is_closing():
            self._start_timer(self._limits.header_timeout_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        self._unset_keepalive_if_required()
        self._disconnect_app()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    # -- called by the parser -------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self._num_messages += 1
        self._num_trailers = self._discarded_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header of the request's head. Trailers are only counted and then dropped, since
        the headers that were checked must not change afterwards."""
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
        self._remaining_body_bytes = head.body_bytes or 0
        self._chunks = ChunkedBodyScanner() if head.body_bytes is None else None
        self._stop_timer()
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
            return  # after an upgrade header, llhttp takes the body for another protocol's data
        super().on_message_complete()
        if self._num_trailers:
            self.renew_parser()  # llhttp treats "connection: close" in a trailer as a header
        self._in_message = self._has_head = False
        self._head, self._chunks = b"", None
        if self.cycle.response_complete:
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self._limits.keep_alive_timeout_seconds, self.timeout_keep_alive_handler
            )

    def renew_parser(self) -> None:
        """Replace the parser with a new one that has no state."""
        self.parser = httptools.HttpRequestParser(self)

    # -- called by uvicorn ----------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        cycle.scope[INLINE_WRITER_KEY] = UvicornBodyWriter(cycle)
        if cycle.scope["http_version"] == "1.0":
            cycle.send = Http10BodySender(cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_flush_timer()
        elif self._in_body:
            if self.cycle.response_complete:
                self._start_timer(LINGER_SECONDS)
        elif not self._is_answering:
            if self._pipelined:
                data, self._pipelined = bytes(self._pipelined), bytearray()
                self.data_received(data)
            else:
                self._drop_last_request()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_flush_timer()

    def send_400_response(self, msg: str) -> None:
        problem = self._error or ApiError(
            400, f"this is not a valid HTTP/1.1 request: {msg}", code=INVALID_HTTP
        )
        answer = self.cycle
        if answer is not None and answer.response_started and not answer.response_complete:
            self._abort("http")
        else:
            self._refuse(_rejection_reason(problem), problem)

    # -- internals ------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        """Whether the newest request is complete and its response is not complete yet."""
        cycle = self.cycle
        return cycle is not None and not (cycle.response_complete or cycle.more_body)

    @property
    def _in_body(self) -> bool:
        return self._in_message and self._has_head

    def _parse(self, data: bytes, start: int) -> int:
        """Parse the bytes of at most one message; return the position in ``data`` where the rest
        begins."""
        if not self._in_body:
            end = self._end_of_head(data, start)
            self._feed_head(data[start:end])
            return end
        if self._chunks is None:
            assert self._remaining_body_bytes, "llhttp counted another body length"
            end = min(start + self._remaining_body_bytes, len(data))
            self._remaining_body_bytes -= end - start
        else:
            try:
                end = self._chunks.scan(data, start)
            except ApiError as problem:
                self._error = problem
                self.send_400_response(str(problem))
                return len(data)
        self._feed(data[start:end])
        return end

    def _end_of_head(self, data: bytes, start: int) -> int:
        """Return the position in ``data`` after the empty line that ends the head, or ``len(data)``
        if the head continues. The empty line may have begun in earlier data."""
        tail, max_tail = self._tail, len(HEAD_END) - 1
        if tail:
            found = (tail + data[start : start + max_tail]).find(HEAD_END)
            if found >= 0:
                self._tail = b""
                return start + found + len(HEAD_END) - len(tail)
        found = data.find(HEAD_END, start)
        if found >= 0:
            self._tail = b""
            return found + len(HEAD_END)
        self._tail = (tail + data[max(start, len(data) - max_tail) :])[-max_tail:]
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
            self.send_400_response("the request target or a length can't be parsed")
        except httptools.HttpParserError as error:
            self.send_400_response(str(error))

    def _ignore_upgrade(self) -> None:
        """Parse the body as plain HTTP/1.1, with a parser that did not see the upgrade header."""
        self._is_upgrade = False
        framing = [
            b"%b: %b\r\n" % (name, value)
            for name, value in self.headers
            if name in (b"content-length", b"transfer-encoding")
        ]
        self.parser = httptools.HttpRequestParser(BodyParserCallbacks(self))
        self._feed(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")

    def _check_head(self) -> RequestHead:
        """Check the head, and store its target, its host, and whether the client waits for a 100
        response. Raises ApiError."""
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

    def _buffer_pipelined(self, data: bytes) -> None:
        self._pipelined += data
        if len(self._pipelined) > MAX_PIPELINED_BYTES:
            self._abort("ahead")

    def _drop_last_request(self) -> None:
        """Drop the last request's objects, which take half of the memory of an idle connection."""
        if not self._in_message:
            self.scope = self.cycle.scope = {}  # type: ignore[typeddict-item]
            self.headers = []

    def _too_large(self) -> ApiError:
        limits = self._limits
        bound = f"{limits.max_headers} headers, of {limits.max_header_bytes} bytes in total"
        return ApiError(431, f"a request may have at most {bound}", code="headers_too_large")

    def _fail(self, problem: ApiError) -> NoReturn:
        """Stop parsing with an error; uvicorn then calls :meth:`send_400_response`."""
        self._error = problem
        raise problem

    def _refuse(self, reason: str, problem: ApiError) -> None:
        """Send an error response in place of the app's response, and tell the app that the client
        has disconnected."""
        self._on_refusal(reason)
        self._disconnect_app()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        data = problem.json
        self.transport.write(STATUS_LINE[problem.status] + head % len(data) + data)
        self.transport.close()
        self._start_flush_timer()

    def _disconnect_app(self) -> None:
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            _notify_disconnect(cycle.scope.get(INLINE_WRITER_KEY))

    def _abort(self, reason: str) -> None:
        if not self.transport.is_closing():
            self._on_refusal(reason)
        self._disconnect_app()
        self.transport.abort()

    def _start_flush_timer(self) -> None:
        """Limit how long the closing connection waits for the client to read the data that was
        written."""
        self._stop_timer()
        if self.transport.get_write_buffer_size():
            self._start_write_timer()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        """Handle a head, or the rest of an unwanted body, that did not arrive in time."""
        self._timer = None
        if self._in_body:
            self._abort("body")
        elif self._in_message:
            seconds = self._limits.header_timeout_seconds
            problem = ApiError(408, f"the headers did not arrive within {seconds:g} s")
            self._refuse("slow", problem)
        else:
            self._on_refusal("slow")
            self.transport.close()
            self._start_flush_timer()

    def _start_write_timer(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(
                self._limits.write_timeout_seconds, self._on_write_timeout
            )

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _on_write_timeout(self) -> None:
        self._write_timer = None
        self._on_refusal("unread")
        self.transport.abort()
