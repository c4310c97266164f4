"""CORS headers: which web pages may send requests from a browser."""

from collections.abc import Sequence

Headers = list[tuple[bytes, bytes]]

PREFLIGHT_SECONDS = b"600"
ALLOWED_METHODS = b"GET, POST, DELETE"
EXPOSED_HEADERS = (
    b"x-request-id, request-id, x-baton-request-id, x-baton-prefill, x-baton-decode, "
    b"x-baton-transport, x-baton-kv-transfer-bytes, "
    b"x-baton-kv-codec, x-baton-continuation, x-baton-ignored-fields, retry-after, retry-after-ms"
)
EXCLUDED_PATH_PREFIX = "/admin/"
"""Web pages may not use paths with this prefix: without an admin key, admin routes trust local
clients, which would include any page in a local browser."""


class Cors:
    """Makes CORS headers. ``origins`` are exactly as browsers send them, or ``*``. The API uses no
    cookies, so pages are not allowed to send credentials."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._allows_any_origin = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    @property
    def is_enabled(self) -> bool:
        return bool(self._origins)

    def headers(self, path: str, origin: bytes | None) -> Headers:
        """Return the headers to add to a response to a page of ``origin``."""
        if not self.is_enabled or path.startswith(EXCLUDED_PATH_PREFIX):
            return []
        vary: Headers = [] if self._allows_any_origin else [(b"vary", b"origin")]
        allowed = self._allowed(origin)
        if allowed is None:
            return vary
        allow_origin = (b"access-control-allow-origin", allowed)
        return [allow_origin, (b"access-control-expose-headers", EXPOSED_HEADERS), *vary]

    def preflight(
        self, path: str, origin: bytes | None, requested_headers: bytes | None
    ) -> Headers | None:
        """Return the headers of the response to a preflight, or None if the page is not allowed.
        ``requested_headers`` are the headers that the browser asks to send."""
        allowed = self._allowed(origin)
        if allowed is None or path.startswith(EXCLUDED_PATH_PREFIX):
            return None
        return [
            (b"access-control-allow-origin", allowed),
            (b"access-control-allow-methods", ALLOWED_METHODS),
            (b"access-control-allow-headers", requested_headers or b"authorization, content-type"),
            (b"access-control-max-age", PREFLIGHT_SECONDS),
            (b"vary", b"origin, access-control-request-headers"),
            (b"content-length", b"0"),
        ]

    def _allowed(self, origin: bytes | None) -> bytes | None:
        if self._allows_any_origin and origin is not None:
            return b"*"
        return origin if origin in self._origins else None
