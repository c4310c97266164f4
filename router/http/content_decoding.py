"""Decompresses request bodies (``content-encoding: gzip`` and ``deflate``) in small steps."""

import zlib
from collections.abc import Iterator

from router.errors import ApiError
from router.limits import STEP_BYTES, STEP_INPUT_BYTES

ENCODINGS = frozenset({"gzip", "x-gzip", "deflate"})

_ANY_HEADER = 32 + zlib.MAX_WBITS
"""Makes zlib accept both its own header and that of gzip."""


class BodyDecompressor:
    """Decompresses one body. Call :meth:`decompress` for each part of it, then :meth:`finish`."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_ANY_HEADER)
        self.num_compressed_bytes = 0

    def decompress(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed data in steps of at most ``STEP_BYTES``, some of them empty.
        Raises ApiError (400) for invalid data, and for data after the end of the compressed body.
        """
        self.num_compressed_bytes += len(data)
        for start in range(0, len(data), STEP_INPUT_BYTES):
            yield from self._decompress_part(data[start : start + STEP_INPUT_BYTES])

    def _decompress_part(self, data: bytes) -> Iterator[bytes]:
        while True:
            step = self._step(data)
            data = self._stream.unconsumed_tail
            yield step
            if self._stream.unused_data:
                raise _invalid("more data follows the end of the compressed data")
            if not data and len(step) < STEP_BYTES:
                return

    def finish(self) -> None:
        """Raise ApiError (400) if the compressed body is incomplete."""
        if not self._stream.eof:
            raise _invalid("the compressed data ends too early")

    def _step(self, data: bytes) -> bytes:
        try:
            return self._stream.decompress(data, STEP_BYTES)
        except zlib.error as error:
            raise _invalid(str(error)) from error


def _invalid(reason: str) -> ApiError:
    return ApiError(400, f"the compressed body is invalid: {reason}", code="invalid_encoding")
