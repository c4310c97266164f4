"""Runs the router's HTTP connection without sockets: passes it a client's bytes, and collects the
responses that the router writes."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from uvicorn.server import ServerState

from baton.clock import SystemClock
from router.http.connection import HttpConnection
from router.http.connection_limits import ConnectionLimits
from router.http.server import HttpServer

NUM_IDLE_ITERATIONS = 4
"""Event loop iterations without any change after which a connection counts as idle."""

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n")


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request as the ASGI app received it."""

    method: str
    path: str
    body: bytes
    host: bytes = b""


@dataclass(slots=True)
class ConnectionResult:
    """The result of one connection. ``statuses`` has the status codes of its responses in order,
    except 100 (Continue)."""

    requests: list[ReceivedRequest]
    statuses: list[int]
    responses: list[bytes]
    refusals: list[str]
    is_closed: bool
    errors: list[str] = field(default_factory=list)
    """Exceptions that reached the event loop, or a response that is not valid HTTP."""


class MemoryTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.protocol: Any = None
        self.written = bytearray()
        self.closing = False
        self.paused = False

    def write(self, data: Any) -> None:
        if not self.closing:
            self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_write_buffer_size(self) -> int:
        return 0


class ConnectionHarness:
    """Opens HTTP connections to an ASGI app that answers each request with its path. Use it inside
    one event loop, and from one task at a time."""

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self._limits = limits or ConnectionLimits()
        self._config = HttpServer(self._app, SystemClock(), self._limits)._config
        self._received: list[ReceivedRequest] = []

    async def send(self, pieces: Sequence[bytes]) -> ConnectionResult:
        """Send ``pieces`` over one new connection, and let the app run after each piece. Raises
        TimeoutError if the connection stops reading before all pieces are sent."""
        loop = asyncio.get_running_loop()
        state, transport = ServerState(), MemoryTransport()
        self._received, refusals, errors = [], [], []
        loop.set_exception_handler(lambda _, context: errors.append(str(context)))
        connection = HttpConnection(self._config, state, self._limits, refusals.append)
        transport.protocol = connection
        connection.connection_made(transport)
        for piece in pieces:
            await self._wait_until_idle(transport, state)
            if transport.closing:
                break
            if transport.paused:
                raise TimeoutError("the connection stopped reading")
            connection.data_received(piece)
        await self._wait_until_idle(transport, state)
        is_closed = transport.closing
        transport.close()
        await self._wait_until_idle(transport, state)
        answers, problem = _split_responses(bytes(transport.written))
        statuses = [int(_STATUS.match(each)[1]) for each in answers]  # type: ignore[index]
        if problem:
            errors.append(problem)
        return ConnectionResult(self._received, statuses, answers, refusals, is_closed, errors)

    @staticmethod
    async def _wait_until_idle(transport: MemoryTransport, state: ServerState) -> None:
        """Return once the connection has written nothing, and has begun and ended no task, for
        NUM_IDLE_ITERATIONS iterations of the event loop."""
        before, num_quiet = (-1, False, False, 0), 0
        while num_quiet < NUM_IDLE_ITERATIONS:
            await asyncio.sleep(0)
            now = len(transport.written), transport.closing, transport.paused, len(state.tasks)
            num_quiet = num_quiet + 1 if now == before else 0
            before = now

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        host = dict(scope["headers"]).get(b"host", b"")
        self._received.append(ReceivedRequest(scope["method"], scope["path"], body, host))
        answer = scope["path"].encode(errors="replace")
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


def _split_responses(written: bytes) -> tuple[list[bytes], str]:
    """Return the complete responses, and a description of the first invalid one, which is "" if all
    are valid."""
    answers: list[bytes] = []
    start = 0
    while start < len(written):
        end = written.find(b"\r\n\r\n", start) + 4
        head = written[start:end]
        status = _STATUS.match(head)
        if end < 4 or status is None:
            return answers, f"no answer: {written[start : start + 100]!r}"
        if status[1] == b"100":
            start = end
            continue
        length = _LENGTH.search(head)
        if length is None:
            return answers, f"an answer without a length: {head!r}"
        is_head = written[end : end + 1] == b""
        size = 0 if is_head else int(length[1])
        answers.append(written[start : end + size])
        start = end + size
    return answers, ""
