"""Sends streaming requests over HTTP with as little client CPU as possible.

The client parses just enough of HTTP/1.1 to find the beginning and end of a response, so that it
costs little compared with the measured server.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from testkit.machine import SYSTEM_CLOCK

END = b"\r\n0\r\n\r\n"


@dataclass
class StreamLoadResult:
    """The seconds from sending each request to the first bytes of the response body, and to the
    body's end."""

    first_seconds: list[float] = field(default_factory=list)
    whole_seconds: list[float] = field(default_factory=list)
    gaps_seconds: list[float] = field(default_factory=list)
    """The seconds between two reads of one response; only recorded on request."""
    num_events: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)


class RawStream(asyncio.Protocol):
    """A connection that sends one request after the other until none is left."""

    def __init__(
        self, requests: Iterator[bytes], load: StreamLoadResult, *, with_gaps: bool
    ) -> None:
        self._requests = requests
        self._load = load
        self._with_gaps = with_gaps
        self._head, self._tail, self._begun = b"", b"", False
        self._waits = False
        self._read_at = 0.0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def _next(self) -> None:
        request = next(self._requests, None)
        self._waits = request is not None
        if request is None:
            self._transport.close()
            return
        self._head, self._tail, self._begun = b"", b"", False
        self._sent_at = SYSTEM_CLOCK()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now = SYSTEM_CLOCK()
        if not self._begun:
            self._head += data
            head, _, data = self._head.partition(b"\r\n\r\n")
            if not data:
                return
            self._begun = True
            self._load.first_seconds.append(now - self._sent_at)
            if not head.startswith(b"HTTP/1.1 200") or b"chunked" not in head.lower():
                self._fail(f"{head[:60]!r} {data[:200]!r}")
                return
        elif self._with_gaps:
            self._load.gaps_seconds.append(now - self._read_at)
        self._read_at = now
        self._load.num_events += data.count(b"data: ")
        self._tail = (self._tail + data)[-len(END) :]
        if self._tail == END:
            self._load.whole_seconds.append(now - self._sent_at)
            self._next()

    def _fail(self, message: str) -> None:
        self._load.errors.append(message)
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._waits and not self._load.errors:
            self._load.errors.append(f"the connection ended: {error}")
        if not self.done.done():
            self.done.set_result(None)


async def stream_all(
    host: str,
    port: int,
    requests: Sequence[bytes],
    concurrency: int,
    *,
    with_gaps: bool = False,
) -> StreamLoadResult:
    """Send each request once, ``concurrency`` at a time. Raises RuntimeError for any error."""
    load, left = StreamLoadResult(), iter(requests)
    loop = asyncio.get_running_loop()
    began = SYSTEM_CLOCK()
    streams: list[RawStream] = []
    for _ in range(min(concurrency, len(requests))):
        _, stream = await loop.create_connection(
            lambda: RawStream(left, load, with_gaps=with_gaps), host, port
        )
        streams.append(stream)
    await asyncio.gather(*(stream.done for stream in streams))
    load.seconds = SYSTEM_CLOCK() - began
    if load.errors:
        raise RuntimeError(f"{len(load.errors)} requests failed; the first error: {load.errors[0]}")
    return load


def post(path: str, body: bytes) -> bytes:
    """Return a POST request as bytes."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
