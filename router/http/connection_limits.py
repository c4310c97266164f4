"""The limits on HTTP connections: their number, the sizes of what they send, and timeouts."""

from dataclasses import dataclass

from router.limits import MULTIPART_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int = 16_384
    max_header_bytes: int = 32 * 1024
    max_headers: int = 100
    max_body_bytes: int = 8 * 1024 * 1024
    max_file_bytes: int = 0
    """The largest upload, which may exceed ``max_body_bytes``. If an upload is refused, up to this
    much of it is still read, so that the client gets to read the reason."""
    header_timeout_seconds: float = 10.0
    keep_alive_timeout_seconds: float = 75.0
    write_timeout_seconds: float = 30.0

    @property
    def max_discarded_bytes(self) -> int:
        """The maximum number of bytes of a refused request's body that are read and dropped."""
        return max(self.max_body_bytes, self.max_file_bytes + MULTIPART_OVERHEAD_BYTES)
