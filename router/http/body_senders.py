"""Writes the bodies of responses to uvicorn's connections."""

from collections.abc import Callable
from typing import Any


class UvicornBodyWriter:
    """Writes parts of one response's body as uvicorn's ``send`` would, but without waiting."""

    __slots__ = ("_cycle", "on_disconnect")

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self.on_disconnect: Callable[[], None] | None = None

    @property
    def is_disconnected(self) -> bool:
        return bool(self._cycle.disconnected)

    @property
    def is_open(self) -> bool:
        cycle = self._cycle
        is_at_body = cycle.response_started and not cycle.response_complete
        is_read = not (cycle.disconnected or cycle.flow.write_paused)
        return is_at_body and is_read and cycle.chunked_encoding is True

    def write(self, data: bytes) -> None:
        """Write a chunk. Empty data is skipped, since an empty chunk would end the body."""
        if data:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Http10BodySender:
    """Wraps the ``send`` of a uvicorn cycle for HTTP/1.0, which has no chunks: a body of unknown
    length ends when the connection is closed."""

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
        elif self._is_open_ended:
            # uvicorn subtracts the size of each part from this length, and requires that 0 remains
            # after the last part.
            is_last = not message.get("more_body", False)
            size = len(message.get("body", b""))
            self._cycle.expected_content_length = size if is_last else size + 1
        await self._send(message)
