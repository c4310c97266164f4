"""Splits the bytes of a connection into frames, for messages that are too frequent for gRPC.

A frame is a little-endian header (size of the payload in bytes: u32, number: u32, kind: u8),
followed by the payload. ``framed/connection.py`` defines the kinds, and ``framed/calls.py`` the
meaning of the number.
"""

import asyncio
import struct
from collections.abc import Iterator
from typing import cast

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Maximum size of a message. Baton's largest ones are far smaller: a Submit of a million tokens has
5 MB."""

MAX_UNSENT_BYTES = 2 * MAX_MESSAGE_BYTES
"""A connection whose peer leaves this much unread is closed."""

FRAME_HEADER = struct.Struct("<IIB")

Frame = tuple[int, int, bytes]
"""The number, kind and payload of a frame."""


class FrameProtocol(asyncio.Protocol):
    """One end of a connection. It buffers at most one incomplete frame. Subclasses implement
    ``data_received`` with :meth:`split_frames`."""

    max_payload_bytes = MAX_MESSAGE_BYTES

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._rest = bytearray()  # the beginning of an incomplete frame
        self._wanted = 0  # its total size, as far as known

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def split_frames(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that ``data`` completes, and keep the rest for the next call. Stop if
        the connection is closed meanwhile."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            data, self._rest = bytes(self._rest), bytearray()
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
            yield number, kind, data[body:begin]
            if self.is_closing:
                return
            self._wanted = FRAME_HEADER.size
        if begin < end:
            self._rest += data[begin:]

    @property
    def is_closing(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    def send(self, number: int, kind: int, payload: bytes) -> None:
        """Send a frame; it is dropped if the connection has ended."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        transport.write(FRAME_HEADER.pack(len(payload), number, kind) + payload)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.on_write_buffer_full()

    def close(self) -> None:
        """Close at once; unsent data is lost."""
        if self.transport is not None:
            self.transport.abort()

    def on_too_large(self, size_bytes: int) -> None:
        """Handle a frame whose payload exceeds ``max_payload_bytes``. This implementation closes
        the connection at once; every override must end it, too."""
        self.close()

    def on_write_buffer_full(self) -> None:
        """Handle a peer that does not read, so that more than MAX_UNSENT_BYTES wait to be sent.
        This implementation closes the connection at once; every override must end it, too."""
        self.close()
