"""Where a chunked body ends, and what it has beside its data (RFC 9112, 7.1)."""

from router.errors import ApiError

MAX_FRAMING_BYTES = 4096
"""Chunk extensions and trailers of one body together, which nobody reads. Clients send none, and
proxies some dozens of bytes."""

PLAIN_LINE_BYTES = 10
"""Of the line of a chunk's size without extensions: up to 8 digits and its end."""

MAX_SMALL_CHUNKS = 8192
SMALL_CHUNK_BYTES = 64
"""A chunk costs some microseconds, however little is in it: so many of a body may be as small as
one likes, and one more for each 64 bytes of data."""


class ChunkedBodyScanner:
    """Finds the end of one body, so that no more is parsed than that. Judges no syntax: whoever
    parses what :meth:`scan` has found does."""

    def __init__(self) -> None:
        self._left = 0  # of a chunk's data and its line break
        self._line = b""  # as far as it has come
        self._in_trailers = False
        self._num_chunks = 0
        self._data_bytes = 0
        self._framing_bytes = 0

    def scan(self, data: bytes, start: int) -> int:
        """Return where the body ends in ``data``, or the end of ``data``. Raises Problem (413, 431)
        for too many chunks, or too much beside them."""
        place, size = start, len(data)
        while place < size:
            if self._left:
                step = min(self._left, size - place)
                self._left -= step
                place += step
                continue
            end = data.find(b"\n", place) + 1
            self._line += data[place : end or size]
            if not end:
                self._check_framing(self._framing_bytes + len(self._line))
                return size
            place, line, self._line = end, self._line, b""
            if self._in_trailers:
                self._count(len(line))
                if line == b"\r\n":
                    return place
            else:
                self._begin_chunk(line)
        return size

    def _begin_chunk(self, line: bytes) -> None:
        try:
            num_bytes = int(line.partition(b";")[0], 16)
        except ValueError:
            num_bytes = 0
        self._in_trailers = num_bytes <= 0
        self._left = num_bytes + 2 if num_bytes > 0 else 0
        self._data_bytes += num_bytes
        self._count(max(len(line) - PLAIN_LINE_BYTES, 0))
        self._num_chunks += 1
        surplus = self._num_chunks - MAX_SMALL_CHUNKS
        if surplus > 0 and surplus > self._data_bytes // SMALL_CHUNK_BYTES:
            message = f"the body comes in chunks of less than {SMALL_CHUNK_BYTES} bytes"
            raise ApiError(413, f"{message}; send larger ones", code="too_many_chunks")

    def _count(self, num_bytes: int) -> None:
        self._framing_bytes += num_bytes
        self._check_framing(self._framing_bytes)

    @staticmethod
    def _check_framing(num_bytes: int) -> None:
        if num_bytes > MAX_FRAMING_BYTES:
            what = f"chunk extensions and trailers have more than {MAX_FRAMING_BYTES} bytes"
            raise ApiError(431, what, code="headers_too_large")
