"""Opens connections to a server and leaves each of them, as a client that does not wait does."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections import deque
from dataclasses import dataclass

from testkit.machine import SYSTEM_CLOCK

TICK_SECONDS = 0.01
LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
BODY = b'{"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}'
REQUEST = LINE + (
    b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(BODY), BODY)
)
RESET = struct.pack("ii", 1, 0)
"""The value of SO_LINGER with which a socket is reset when it is closed."""

IP_BIND_ADDRESS_NO_PORT = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24)
"""Linux's option to choose the port when the socket connects; so ports can be used again sooner."""


def client_hello() -> bytes:
    """Return the first bytes that a client of TLS sends."""
    sent = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="x")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


@dataclass(frozen=True)
class Departure:
    """How a client leaves: what it sends first, whether it resets the connection, and after how
    many seconds."""

    data: bytes = b""
    resets: bool = False
    stays_seconds: float = 0.0


DEPARTURES = {
    "at once": Departure(),
    "after a line": Departure(LINE),
    "after a request": Departure(REQUEST),
    "after TLS hello": Departure(client_hello()),
    "by a reset": Departure(resets=True),
    "with an answer": Departure(REQUEST, stays_seconds=0.5),
}


async def leave(
    address: tuple[str, int],
    departure: Departure,
    per_second: float,
    seconds: float,
    source: str = "",
) -> int:
    """Open ``per_second`` connections to ``address`` for ``seconds``, from the local address
    ``source`` if there is one, and leave each. Return their number."""
    began, tried, opened = SYSTEM_CLOCK(), 0, 0
    staying: deque[tuple[float, socket.socket]] = deque()
    while (elapsed := SYSTEM_CLOCK() - began) < seconds:
        due = int(elapsed * per_second)
        for _ in range(due - tried):
            with contextlib.suppress(OSError):
                connection = open_connection(address, departure, source)
                staying.append((elapsed + departure.stays_seconds, connection))
                opened += 1
            _leave_due(staying, elapsed)
        tried = due
        await asyncio.sleep(TICK_SECONDS)
    _leave_due(staying, float("inf"))
    return opened


def _leave_due(staying: deque[tuple[float, socket.socket]], now: float) -> None:
    while staying and staying[0][0] <= now:
        staying.popleft()[1].close()


def open_connection(address: tuple[str, int], departure: Departure, source: str) -> socket.socket:
    """Return a connected socket. Connecting within a machine ends at once, so the socket can be
    written to although it does not block. Raises OSError."""
    client = socket.socket()
    try:
        client.setblocking(False)
        if departure.resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if source:
            client.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            client.bind((source, 0))
        with contextlib.suppress(BlockingIOError):
            client.connect(address)
        if departure.data:
            client.send(departure.data)
    except OSError:
        client.close()
        raise
    return client
