"""Finds the end of a chunked body, and limits the size of its chunk headers, extensions and
trailers (RFC 9112, 7.1)."""

from router.errors import ApiError
from router.limits import MAX_FRAMING_BYTES, MAX_SMALL_CHUNKS, SMALL_CHUNK_BYTES

PLAIN_LINE_BYTES = 10
"""The longest size line of a chunk without extensions: 8 digits and the line break."""


class ChunkedBodyScanner:
    """Finds the end of one body, so that the bytes after it are not parsed as part of it. Does not
    check the syntax: that is left to the HTTP parser, which gets the data up to this end."""

    def __init__(self) -> None:
        self._remaining_bytes = 0  # bytes to come of the current chunk's data and its line break
        self._line = b""  # the size line or trailer that is still incomplete
        self._in_trailers = False
        self._num_chunks = 0
        self._data_bytes = 0
        self._framing_bytes = 0

    def scan(self, data: bytes, start: int) -> int:
        """Return the position in ``data`` where the body ends, or ``len(data)`` if it continues.
        Raises ApiError: 413 for too many small chunks, 431 for extensions and trailers that are too
        long."""
        position, size = start, len(data)
        while position < size:
            if self._remaining_bytes:
                num_skipped = min(self._remaining_bytes, size - position)
                self._remaining_bytes -= num_skipped
                position += num_skipped
                continue
            end = data.find(b"\n", position) + 1
            self._line += data[position : end or size]
            if not end:
                self._check_framing(self._framing_bytes + len(self._line))
                return size
            position, line, self._line = end, self._line, b""
            if self._in_trailers:
                self._count_framing(len(line))
                if line == b"\r\n":
                    return position
            else:
                self._begin_chunk(line)
        return size

    def _begin_chunk(self, line: bytes) -> None:
        try:
            num_bytes = int(line.partition(b";")[0], 16)
        except ValueError:
            num_bytes = 0
        self._in_trailers = num_bytes <= 0
        self._remaining_bytes = num_bytes + 2 if num_bytes > 0 else 0
        self._data_bytes += num_bytes
        self._count_framing(max(len(line) - PLAIN_LINE_BYTES, 0))
        self._num_chunks += 1
        surplus = self._num_chunks - MAX_SMALL_CHUNKS
        if surplus > 0 and surplus > self._data_bytes // SMALL_CHUNK_BYTES:
            raise ApiError(
                413,
                f"the body has too many chunks of less than {SMALL_CHUNK_BYTES} bytes; send larger "
                "chunks",
                code="too_many_chunks",
            )

    def _count_framing(self, num_bytes: int) -> None:
        self._framing_bytes += num_bytes
        self._check_framing(self._framing_bytes)

    @staticmethod
    def _check_framing(num_bytes: int) -> None:
        if num_bytes > MAX_FRAMING_BYTES:
            what = f"chunk extensions and trailers exceed {MAX_FRAMING_BYTES} bytes in total"
            raise ApiError(431, what, code="headers_too_large")
