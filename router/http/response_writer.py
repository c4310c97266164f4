"""Raw ASGI: a bounded body in, a response out, and a client that may leave at any time."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from baton.concurrency.time_limit import TimeLimit
from router.errors import ApiError
from router.http.raw_body import RawBody

JSON_HEADERS = {"content-type": "application/json"}
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies would collect what is meant to arrive token by token.
    "x-accel-buffering": "no",
}
CLIENT_CLOSED_REQUEST = 499
MAX_LENGTH_DIGITS = 20
INLINE_WRITER_KEY = "baton.push"
"""Where a scope has a :class:`InlineBodyWriter`, if its server can."""
REQUEST_ID_KEY = "baton.request_id"
"""Where a scope has the id that client and logs know a request by."""


class ClientDisconnected(Exception):
    """Nobody is there to answer."""


class InlineBodyWriter(Protocol):
    """A way into the socket that never waits. ``on_leave`` is called when the client leaves."""

    on_leave: Callable[[], None] | None

    @property
    def has_left(self) -> bool: ...

    @property
    def is_open(self) -> bool:
        """A body has begun, and the client keeps up with it."""
        ...

    def write(self, data: bytes) -> None:
        """A part of the body; only while it is open."""
        ...


class ResponseWriter:
    """One response. ``status`` is 0 until it has begun."""

    def __init__(self, send: Send, push: InlineBodyWriter | None = None) -> None:
        self._send = send
        self._push = push
        self.status = 0

    @property
    def can_push(self) -> bool:
        return self._push is not None and self.status != 0 and self._push.is_open

    def push(self, data: bytes) -> None:
        """As :meth:`write`, at once; only while it ``can_push``."""
        assert self._push is not None
        self._push.write(data)

    @property
    def started(self) -> bool:
        return self.status != 0

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        message = {"type": "http.response.start", "status": status, "headers": encoded}
        await self._send(message)

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def respond(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
        await self.start(status, {**headers, "content-length": str(len(data))})
        await self.end(data)

    async def fail(self, problem: ApiError, headers: Mapping[str, str]) -> None:
        """The response, or the last event of a stream that has begun."""
        if self.started:
            await self.end(b"data: " + problem.json + b"\n\n")
        else:
            together = {**JSON_HEADERS, **headers, **problem.headers}
            await self.respond(problem.status, together, problem.json)


def get_header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


def content_length(scope: Scope) -> int:
    """Bytes of the body, as its header says; 0 where it does not."""
    length = get_header(scope, b"content-length")
    if length is None or not (length.isascii() and length.isdigit()):
        return 0
    return int(length[:MAX_LENGTH_DIGITS])


async def read_body(
    scope: Scope, receive: Receive, body: RawBody, max_bytes: int, seconds: float
) -> None:
    """Into ``body``. Raises Problem (408, 413, 415), Overloaded or ClientLeft. Never holds more
    than ``max_bytes`` and what the server hands over at once."""
    _check_headers(scope, max_bytes)
    try:
        with TimeLimit(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                body.add(message.get("body", b""))
                if body.size_bytes > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s") from error


async def cancel_on_disconnect(
    receive: Receive, work: Coroutine[Any, Any, None], push: InlineBodyWriter | None = None
) -> None:
    """Runs ``work``, and cancels it at once when the client leaves (raises ClientLeft then).

    The body has been read before: what ``receive`` has left to say is that the client is gone.
    """
    if push is not None:
        await _cancel_when_pushed(push, work)
        return
    left = False

    async def watch(task: asyncio.Task[None]) -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            worker = tasks.create_task(work)
            watcher = tasks.create_task(watch(worker))
            worker.add_done_callback(lambda _: watcher.cancel())
    except* Exception as group:
        failure = group.exceptions[0]
    if failure is not None:
        raise failure
    if left and worker.cancelled():
        raise ClientDisconnected


async def _cancel_when_pushed(push: InlineBodyWriter, work: Coroutine[Any, Any, None]) -> None:
    """Without a task that does nothing but wait for the client to leave."""
    task, left = asyncio.current_task(), push.has_left
    assert task is not None

    def leave() -> None:
        nonlocal left
        if not left:
            left = True
            task.cancel()

    if left:
        work.close()
        raise ClientDisconnected
    push.on_leave = leave
    try:
        await work
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        push.on_leave = None


def _check_headers(scope: Scope, max_bytes: int) -> None:
    kind = get_header(scope, b"content-type")
    if kind is not None and kind.split(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"content-type is {kind!r}, and must be application/json")
    encoding = get_header(scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        raise ApiError(415, f"content-encoding {encoding!r} is not supported")
    if content_length(scope) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
