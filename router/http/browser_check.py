"""Requests that a browser makes for a web page, where nobody shows a key."""

from collections.abc import Mapping

from baton.network.browser_guard import BrowserGuard
from router.errors import ApiError
from router.tenants.authentication import Authenticator


class BrowserRequestCheck:
    """Keys don't travel with a page's requests by themselves, so whoever shows one was meant to;
    where none is asked for, the page must be one that may ask."""

    def __init__(self, doorkeeper: Authenticator, guard: BrowserGuard) -> None:
        self._doorkeeper = doorkeeper
        self._guard = guard

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raises Problem (403)."""
        if not self._doorkeeper.trusts_without_key(path):
            return
        # What asks whether it may ask has no effect, and is told by CORS.
        is_question = method == "OPTIONS"
        origin = None if is_question else headers.get(b"origin")
        site = None if is_question else headers.get(b"sec-fetch-site")
        refusal = self._guard.refusal(headers.get(b"host"), origin, site)
        if refusal:
            raise ApiError(403, refusal, code="page_not_allowed")
