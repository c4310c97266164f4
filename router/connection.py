"""One HTTP connection: uvicorn's, with a bound on everything that a client can send or not read.

What uvicorn leaves open is closed here: how large a request's head may be and how long it may take,
requests that come before the one in front was answered, bodies of requests that were answered
without them, and readers that don't read.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from router.problem import Problem
from router.wire import PUSH

MAX_TARGET_BYTES = 8192
"""Of a request's target. The API's own have less than a hundred."""

MAX_AHEAD_BYTES = 64 * 1024
"""Of further requests, before the answer to the first."""

LINGER_SECONDS = 5.0
"""For the rest of a body that nobody wants any more: a connection that is closed on it may lose the
answer on its way."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int = 16_384
    max_header_bytes: int = 32 * 1024
    max_headers: int = 100
    max_body_bytes: int = 8 * 1024 * 1024
    header_seconds: float = 10.0
    keep_alive_seconds: float = 75.0
    write_seconds: float = 30.0


class CyclePush:
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


def _tell_left(push: CyclePush | None) -> None:
    if push is not None and push.on_leave is not None:
        push.on_leave()


class Connection(HttpToolsProtocol):
    """``on_refusal`` is told in one word which bound a client overstepped.

    A message is idle (none is coming), in its head, in its body, or whole. uvicorn's ``cycle`` is
    the newest one whose head was whole, with its answer; older ones wait in ``pipeline``, but for
    ``_answered_now``.
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
        self._answered_now: Any = None
        self._in_message = False
        self._has_head = False
        self._is_last = False
        self._num_messages = 0
        self._num_headers = 0
        self._head_bytes = 0  # of its line and headers
        self._unparsed_bytes = 0  # came without any effect
        self._discarded_bytes = 0
        self._ahead = b""
        self._problem: Problem | None = None

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
            self._refuse("connections", Problem(503, "too many connections", code="overloaded"))
        else:
            self._arm(self._limits.header_seconds)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering:
            self._keep(data)
            return
        had_head, num_messages = self._has_head, self._num_messages
        super().data_received(data)
        if self._has_head or self._is_answering or self.transport.is_closing():
            return
        if self._timer is None:
            self._arm(self._limits.header_seconds)
        if not had_head and num_messages == self._num_messages:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > self._limits.max_header_bytes:
                self._refuse("headers", self._too_large())

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._disarm_write()
        self._unset_keepalive_if_required()
        for cycle in (self._answered_now, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                _tell_left(cycle.scope.get(PUSH))
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
        self._num_headers = self._head_bytes = self._unparsed_bytes = self._discarded_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        if len(self.url) + len(url) > MAX_TARGET_BYTES:
            self._fail(Problem(414, f"the path has more than {MAX_TARGET_BYTES} bytes"))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers count as well, and are dropped: no header appears after it was looked for."""
        self._num_headers += 1
        self._count(len(name) + len(value))
        if self._num_headers > self._limits.max_headers:
            self._fail(self._too_large())
        if not self._has_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._disarm()
        super().on_headers_complete()
        if self._is_last:
            self.cycle.keep_alive = False
        # Who waits in the pipeline is no reason not to notice that the client leaves.
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > self._limits.max_body_bytes:
                self._abort("body")
        elif self.pipeline and len(self.cycle.body) > MAX_AHEAD_BYTES:
            self._abort("ahead")

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_message = self._has_head = False
        if self.cycle.response_complete:
            self._disarm()
            self.timeout_keep_alive_task = self.loop.call_later(
                self._limits.keep_alive_seconds, self.timeout_keep_alive_handler
            )

    # -- uvicorn calls --------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answered_now = cycle
        cycle.scope[PUSH] = CyclePush(cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_flush()
        elif self._in_body:
            if self.cycle.response_complete:
                self._arm(LINGER_SECONDS)
        elif not self._is_answering:
            if self._in_message:  # the next one's head has begun behind this request
                self._unset_keepalive_if_required()
                self._arm(self._limits.header_seconds)
            data, self._ahead = self._ahead, b""
            if data:
                self.data_received(data)
            else:
                self._forget()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._await_flush()

    def send_400_response(self, msg: str) -> None:
        problem = self._problem or Problem(400, "this is no HTTP/1.1 request", code="invalid_http")
        answer = self._answered_now
        if answer is not None and answer.response_started and not answer.response_complete:
            self._abort("http")
        else:
            self._refuse("headers" if self._problem else "http", problem)

    # -- parts ----------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        """The newest request is whole, and its answer is not."""
        cycle = self.cycle
        return cycle is not None and not (cycle.response_complete or cycle.more_body)

    @property
    def _in_body(self) -> bool:
        return self._in_message and self._has_head

    def _keep(self, data: bytes) -> None:
        self._ahead += data
        if len(self._ahead) > MAX_AHEAD_BYTES:
            self._abort("ahead")

    def _forget(self) -> None:
        """An idle connection keeps nothing of the last request: half of its memory."""
        if not self._in_message:
            self.scope = self.cycle.scope = {}  # type: ignore[typeddict-item]
            self.headers = []

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self._limits.max_header_bytes:
            self._fail(self._too_large())

    def _too_large(self) -> Problem:
        limits = self._limits
        bound = f"{limits.max_headers} headers and {limits.max_header_bytes} bytes of them"
        return Problem(431, f"a request has at most {bound}", code="headers_too_large")

    def _fail(self, problem: Problem) -> None:
        """Ends the parsing; uvicorn then asks for :meth:`send_400_response`."""
        self._problem = problem
        raise problem

    def _refuse(self, reason: str, problem: Problem) -> None:
        self._on_refusal(reason)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        data = problem.json
        self.transport.write(STATUS_LINE[problem.status] + head % len(data) + data)
        self.transport.close()
        self._await_flush()

    def _abort(self, reason: str) -> None:
        if not self.transport.is_closing():
            self._on_refusal(reason)
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
            problem = Problem(408, f"the headers did not arrive within {seconds:g} s")
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
