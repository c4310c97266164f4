"""Which web pages may ask from within a browser, as browsers are told."""

from collections.abc import Sequence

Headers = list[tuple[bytes, bytes]]

PREFLIGHT_SECONDS = b"600"
ALLOWED_METHODS = b"GET, POST, DELETE"
EXPOSED_HEADERS = (
    b"x-request-id, x-baton-request-id, x-baton-prefill, x-baton-decode, x-baton-transport, "
    b"x-baton-bytes-shipped, retry-after"
)
EXCLUDED_PATH_PREFIX = "/admin/"
"""Without a key it trusts this machine, and so would do what any page in a browser here wants."""


class Cors:
    """``origins`` exactly as browsers send them, or ``*``. No cookies, so no credentials."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._everybody = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    @property
    def is_on(self) -> bool:
        return bool(self._origins)

    def headers(self, path: str, origin: bytes | None) -> Headers:
        """What an answer to a page of ``origin`` carries."""
        if not self.is_on or path.startswith(EXCLUDED_PATH_PREFIX):
            return []
        vary: Headers = [] if self._everybody else [(b"vary", b"origin")]
        allowed = self._allowed(origin)
        if allowed is None:
            return vary
        told = (b"access-control-allow-origin", allowed)
        return [told, (b"access-control-expose-headers", EXPOSED_HEADERS), *vary]

    def preflight(self, path: str, origin: bytes | None, asked: bytes | None) -> Headers | None:
        """The answer to what a browser asks before it asks, with ``asked`` as the headers that it
        means to send; None when the page may not."""
        allowed = self._allowed(origin)
        if allowed is None or path.startswith(EXCLUDED_PATH_PREFIX):
            return None
        return [
            (b"access-control-allow-origin", allowed),
            (b"access-control-allow-methods", ALLOWED_METHODS),
            (b"access-control-allow-headers", asked or b"authorization, content-type"),
            (b"access-control-max-age", PREFLIGHT_SECONDS),
            (b"vary", b"origin, access-control-request-headers"),
            (b"content-length", b"0"),
        ]

    def _allowed(self, origin: bytes | None) -> bytes | None:
        if self._everybody and origin is not None:
            return b"*"
        return origin if origin in self._origins else None
