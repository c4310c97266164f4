"""Rejects requests that browsers send on behalf of untrusted web pages to paths that need no
key."""

from collections.abc import Mapping

from baton.network.browser_guard import BrowserGuard
from router.errors import ApiError
from router.tenants.authentication import Authenticator


class BrowserRequestCheck:
    """Checks requests to paths that need no key: only pages of allowed origins may send them. A
    request that needs a key is not checked, since browsers don't attach keys by themselves."""

    def __init__(self, authenticator: Authenticator, guard: BrowserGuard) -> None:
        self._authenticator = authenticator
        self._guard = guard

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise ApiError (403) if the request comes from a page that is not allowed."""
        if not self._authenticator.allows_without_key(path):
            return
        # A preflight request has no effect, and is answered according to the CORS settings.
        is_preflight = method == "OPTIONS"
        origin = None if is_preflight else headers.get(b"origin")
        site = None if is_preflight else headers.get(b"sec-fetch-site")
        refusal = self._guard.refusal(headers.get(b"host"), origin, site)
        if refusal:
            raise ApiError(403, refusal, code="page_not_allowed")
