"""Runs the HTTP server over real sockets, with an app that records what it receives."""

import asyncio
import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from baton.clock import SystemClock
from router.http.connection_limits import ConnectionLimits
from router.http.server import HttpServer, open_listener

CLOCK = SystemClock()
LIMITS = ConnectionLimits(max_header_bytes=2048, max_headers=20, max_body_bytes=100_000)
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CLOSING_GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test on uvloop, like the router."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*arguments, **named))

    return run


class Bench:
    """A server whose app records the requests that it received, and how many clients have left."""

    def __init__(self, limits: ConnectionLimits, tls: ssl.SSLContext | None = None) -> None:
        self.refusals: list[str] = []
        self.requests: list[tuple[str, bytes]] = []
        self.left = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.chunks = [b"ok"]
        self.reads_body = True
        self.server = HttpServer(self._app, CLOCK, limits, self.refusals.append, tls)
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", self.reads_body
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body += message["body"]
            more = message["more_body"]
        self.requests.append((scope["path"], body))
        answer = asyncio.ensure_future(self._answer(send))
        leaving = asyncio.ensure_future(_left(receive))
        await asyncio.wait([answer, leaving], return_when=asyncio.FIRST_COMPLETED)
        self.left += not answer.done()
        for task in (answer, leaving):
            task.cancel()
        await asyncio.wait([answer, leaving])

    async def _answer(self, send: Any) -> None:
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def connect(
        self, source: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=(source, 0)
        )
        self.writers.append(writer)
        return reader, writer

    async def ask(self, data: bytes) -> bytes:
        """Send ``data``, and return everything received until the server closes the connection."""
        reader, writer = await self.connect()
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                return await reader.read()
            return b""


async def _left(receive: Callable[[], Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def bench(
    limits: ConnectionLimits = LIMITS, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Bench]:
    running = Bench(limits, tls)
    listener = open_listener("127.0.0.1", 0)
    running.port = listener.getsockname()[1]
    running.server.listen(listener)
    try:
        yield running
    finally:
        running.may_answer.set()
        await running.server.close()
        for writer in running.writers:
            writer.close()
        await asyncio.gather(
            *(each.wait_closed() for each in running.writers), return_exceptions=True
        )
    assert running.server.num_connections == 0


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0
