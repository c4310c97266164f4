"""What all requests have in common, before any route: an id, CORS, a line in the log, and the short
way to the routes that are asked most.

FastAPI takes 0.24 ms of each request, as much as half of the whole server; the routes whose bodies
it would not read anyway are reached without it.
"""

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.clock import Clock
from router.errors import ApiError
from router.http.browser_check import BrowserRequestCheck
from router.http.cors import Cors, Headers
from router.http.response_writer import REQUEST_ID_KEY, ResponseWriter

CLIENT_REQUEST_ID_PATTERN = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""Of a client's own request id: fit for a header and a log. Others get one of ours."""

MAX_LOGGED_PATH = 256


class HttpFrontend:
    """An ASGI app around ``routes``. ``short_ways`` are POST routes by their path, each making an
    app for one request. ``is_closing`` says whether connections are to end with their answer."""

    def __init__(
        self,
        routes: ASGIApp,
        short_ways: Mapping[str, Callable[[], ASGIApp]],
        cors: Cors,
        page_check: BrowserRequestCheck,
        clock: Clock,
        id_prefix: str,
        is_closing: Callable[[], bool],
        access_log: TextIO | None = None,
    ) -> None:
        self._routes = routes
        self._short_ways = short_ways
        self._cors = cors
        self._page_check = page_check
        self._clock = clock
        self._id_prefix = id_prefix
        self._num_requests = 0
        self._is_closing = is_closing
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = dict(scope["headers"])
        extra = self._common_headers(scope, asked)
        reply = ResponseRecorder(send, extra)
        began = self._clock.monotonic() if self._access_log is not None else 0.0
        try:
            await self._answer(scope, asked, receive, reply)
        finally:
            if self._access_log is not None:
                self._write_line(scope, reply, self._clock.monotonic() - began)

    async def _answer(
        self,
        scope: Scope,
        asked: Mapping[bytes, bytes],
        receive: Receive,
        reply: "ResponseRecorder",
    ) -> None:
        method, short_way = scope["method"], self._short_ways.get(scope["path"])
        try:
            self._page_check.check(method, scope["path"], asked)
        except ApiError as problem:
            await ResponseWriter(reply.send).fail(problem, {})
            return
        if short_way is not None and method == "POST":
            await short_way()(scope, receive, reply.send)
        elif method == "HEAD":  # the server leaves out the body
            await self._routes({**scope, "method": "GET"}, receive, reply.send)
        elif method == "OPTIONS" and await self._preflight(scope, asked, reply):
            return
        else:
            await self._routes(scope, receive, reply.send)

    async def _preflight(
        self, scope: Scope, asked: Mapping[bytes, bytes], reply: "ResponseRecorder"
    ) -> bool:
        if b"access-control-request-method" not in asked:
            return False
        wanted = asked.get(b"access-control-request-headers")
        headers = self._cors.preflight(scope["path"], asked.get(b"origin"), wanted)
        if headers is None:
            return False
        reply.extra = [each for each in reply.extra if each[0] == b"x-request-id"]
        await reply.send({"type": "http.response.start", "status": 204, "headers": headers})
        await reply.send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    def _common_headers(self, scope: Scope, asked: Mapping[bytes, bytes]) -> Headers:
        given = asked.get(b"x-request-id", b"")
        if CLIENT_REQUEST_ID_PATTERN.fullmatch(given) is None:
            self._num_requests += 1
            given = f"req-{self._id_prefix}-{self._num_requests}".encode()
        scope[REQUEST_ID_KEY] = given.decode()
        headers = [(b"x-request-id", given)]
        if self._cors.is_on:
            headers += self._cors.headers(scope["path"], asked.get(b"origin"))
        if self._is_closing():
            headers.append((b"connection", b"close"))
        return headers

    def _write_line(self, scope: Scope, reply: "ResponseRecorder", seconds: float) -> None:
        assert self._access_log is not None
        client = scope.get("client") or ("",)
        line = {
            "event": "request",
            "at": self._clock.wall_nanoseconds() // 1_000_000 / 1000,
            "request_id": scope[REQUEST_ID_KEY],
            "client": client[0],
            "method": scope["method"],
            "path": scope["path"][:MAX_LOGGED_PATH].encode(errors="replace").decode(),
            "status": reply.status,
            "seconds": round(seconds, 6),
            "answered_as": reply.answered_as,
        }
        self._access_log.write(orjson.dumps(line).decode() + "\n")


class ResponseRecorder:
    """The way back, with ``extra`` headers on it. ``status`` is 0 when there was no answer."""

    __slots__ = ("_send", "answered_as", "extra", "status")

    def __init__(self, send: Send, extra: Headers) -> None:
        self._send = send
        self.extra = extra
        self.status = 0
        self.answered_as = ""

    def send(self, message: Message) -> Any:
        """An awaitable: a coroutine of its own would cost each token something."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), *self.extra]
            self.answered_as = _value(headers, b"x-baton-request-id")
            message = {**message, "headers": headers}
        return self._send(message)


def _value(headers: Headers, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in headers if key == name), "")


def open_access_log(is_on: bool) -> TextIO | None:
    return sys.stderr if is_on else None
