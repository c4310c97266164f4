"""Bytes of a connection, cut into frames: for what is too frequent for gRPC.

A frame is (payload bytes: u32, number: u32, kind: u8), little-endian, then the payload. What number
and kind mean is a matter of whoever speaks: the store's door (``door.py``) or a line (``line.py``).
"""

import asyncio
import struct
from typing import cast

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""A Submit of a million tokens is 5 MB; nothing of ours comes near this cap."""

MAX_UNSENT_BYTES = 2 * MAX_MESSAGE_BYTES
"""A peer that leaves so much unread is closed."""

FRAME_HEADER = struct.Struct("<IIB")


class FrameProtocol(asyncio.Protocol):
    """One end of a connection. It holds a frame that is not whole, and no more."""

    max_payload_bytes = MAX_MESSAGE_BYTES

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._rest = bytearray()  # of a frame that is not whole
        self._wanted = 0  # bytes of it, as far as known

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            data, self._rest = bytes(self._rest), bytearray()
        self._cut(data)

    def _cut(self, data: bytes) -> None:
        begin, end = 0, len(data)
        self._wanted = FRAME_HEADER.size
        while end - begin >= FRAME_HEADER.size:
            size, number, kind = FRAME_HEADER.unpack_from(data, begin)
            if size > self.max_payload_bytes:
                self.on_too_large(size)
                return
            self._wanted = FRAME_HEADER.size + size
            if end - begin < self._wanted:
                break
            body, begin = begin + FRAME_HEADER.size, begin + self._wanted
            self.on_frame(number, kind, data[body:begin])
            if self.is_closing:
                return
            self._wanted = FRAME_HEADER.size
        if begin < end:
            self._rest += data[begin:]

    @property
    def is_closing(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    def send(self, number: int, kind: int, payload: bytes) -> None:
        """Dropped once the other side has gone."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        transport.write(FRAME_HEADER.pack(len(payload), number, kind) + payload)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.on_unread()

    def close(self) -> None:
        """At once; what was not sent is lost."""
        if self.transport is not None:
            self.transport.abort()

    def on_frame(self, number: int, kind: int, payload: bytes) -> None:
        raise NotImplementedError

    def on_too_large(self, size_bytes: int) -> None:
        """The peer sends a larger frame than it may."""
        self.close()

    def on_unread(self) -> None:
        """The peer leaves too much unread."""
        self.close()
