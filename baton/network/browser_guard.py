"""Refuses requests that a browser sends on behalf of other sites' web pages.

A server without API keys trusts any client that can reach its port. A browser on such a client's
machine sends requests to that port for any web page that it shows. The browser adds two headers
that no page can change: ``Origin``, the page's origin, on every request that has effects or whose
answer the page may read; and ``Host``, the name under which the page addresses this server. A page
whose own name was made to resolve to this host (DNS rebinding) has the same origin as this server;
only ``Host`` reveals it.
"""

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache

MAX_CACHED_DECISIONS = 256
"""Maximum number of cached decisions. Clients send the same few hosts and origins again and
again."""

CROSS_SITE_ERROR = (
    "the request comes from a web page of another site, and does not say from which: open the "
    "address itself, or let the page send the request by fetch, and add its origin to the setting "
    "cors_origins"
)
OPAQUE_ORIGIN = b"null"
"""The origin of a page from a file, and of any page in a sandboxed frame (HTML, "opaque
origin")."""

OPAQUE_ORIGIN_ERROR = (
    "the request comes from a web page without an origin (Origin: null), such as a file: serve the "
    "page over HTTP, or add null to the setting cors_origins, which allows every site to send "
    "requests, since every site can show a page without an origin"
)

_ORIGIN = re.compile(rb"(https?)://([^/?#@\s]+)")
_PORT = re.compile(rb":[0-9]*\Z")
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}


class BrowserGuard:
    """Decides whether a request is allowed, by the request's headers. ``origins`` are the origins
    of pages that may send requests, or ``*`` for all. ``hosts`` are the host names that are
    accepted besides those of loopback; None accepts any."""

    def __init__(self, origins: Sequence[str] = (), hosts: Sequence[str] | None = None) -> None:
        self._all_origins = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)
        self._hosts = None if hosts is None else frozenset(host.lower().encode() for host in hosts)
        self.refusal = lru_cache(maxsize=MAX_CACHED_DECISIONS)(self._refusal)
        """Returns why a request with these headers is refused; empty if it is allowed. The
        arguments are the values of Host, Origin and Sec-Fetch-Site, None for missing ones."""

    def _refusal(self, host: bytes | None, origin: bytes | None, site: bytes | None) -> str:
        if host is not None and not self._accepts_host(host):
            name = _text(normalized_host(host))
            return f"the host {name} is not allowed here: add it to the setting allowed_hosts"
        if self._all_origins:
            return ""
        if origin is None:
            is_foreign = site is not None and site.lower() == b"cross-site"
            return CROSS_SITE_ERROR if is_foreign else ""
        if origin in self._origins or _is_own(origin, host):
            return ""
        if origin == OPAQUE_ORIGIN:
            return OPAQUE_ORIGIN_ERROR
        return (
            f"web pages of {_text(origin)} may not send requests: add it to the setting "
            "cors_origins"
        )

    def _accepts_host(self, host: bytes) -> bool:
        name = normalized_host(host)
        return self._hosts is None or name in self._hosts or is_loopback_name(name)


def normalized_host(authority: bytes) -> bytes:
    """Return the host of ``authority`` in lower case, without a port, brackets or a trailing
    dot."""
    return _PORT.sub(b"", authority).lower().strip(b"[]").removesuffix(b".")


def is_loopback_name(name: bytes) -> bool:
    """Whether ``name`` means this machine wherever it is looked up (RFC 6761)."""
    if name == b"localhost" or name.endswith(b".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.decode("latin-1")).is_loopback
    except ValueError:
        return False


def _is_own(origin: bytes, host: bytes | None) -> bool:
    """Whether the page is from this server, or from another server on this machine."""
    parts = _ORIGIN.fullmatch(origin)
    if parts is None:
        return False
    scheme, authority = parts.groups()
    if is_loopback_name(normalized_host(authority)):
        return True
    default_port = _DEFAULT_PORTS[scheme]
    return host is not None and (
        _with_port(authority, default_port) == _with_port(host, default_port)
    )


def _with_port(authority: bytes, default_port: bytes) -> bytes:
    match = _PORT.search(authority)
    port = match[0] if match is not None and len(match[0]) > 1 else default_port
    return normalized_host(authority) + port


def _text(value: bytes) -> str:
    return value[:100].decode("ascii", "replace")
