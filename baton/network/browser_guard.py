"""Whether a request may come from the web page that a browser sends it for.

Where nobody shows a key, whoever can reach a port is trusted, and a browser on a trusted machine
reaches it for every page that it shows. It tells two things that no page can change: the page's
``Origin``, on whatever has effects or is to be read by the page, and ``Host``, the name by which
the page knows us. A page whose own name was made to point here (DNS rebinding) is of one origin
with us, and only its name gives it away.
"""

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache

MAX_VERDICTS = 256
"""Remembered: clients send the same few hosts and origins again and again."""

CROSS_SITE = (
    "a web page of another site asks: open the address itself, or add the page's origin to the "
    "setting cors_origins"
)

_ORIGIN = re.compile(rb"(https?)://([^/?#@\s]+)")
_PORT = re.compile(rb":[0-9]*\Z")
_USUAL_PORTS = {b"http": b":80", b"https": b":443"}


class BrowserGuard:
    """``origins`` are of the pages that may ask, or ``*`` for all. ``hosts`` are the names by which
    we are known beside those of loopback; None: by any."""

    def __init__(self, origins: Sequence[str] = (), hosts: Sequence[str] | None = None) -> None:
        self._all_origins = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)
        self._hosts = None if hosts is None else frozenset(host.lower().encode() for host in hosts)
        self.refusal = lru_cache(maxsize=MAX_VERDICTS)(self._refusal)
        """Why a request with these headers is refused; empty: it is not. Takes Host, Origin and
        Sec-Fetch-Site as they came, None for those that did not."""

    def _refusal(self, host: bytes | None, origin: bytes | None, site: bytes | None) -> str:
        if host is not None and not self._knows(host):
            name = _text(host_name(host))
            return f"the host {name} is not allowed here: add it to the setting allowed_hosts"
        if self._all_origins:
            return ""
        if origin is None:
            is_foreign = site is not None and site.lower() == b"cross-site"
            return CROSS_SITE if is_foreign else ""
        if origin in self._origins or _is_own(origin, host):
            return ""
        return f"web pages of {_text(origin)} may not ask: add it to the setting cors_origins"

    def _knows(self, host: bytes) -> bool:
        name = host_name(host)
        return self._hosts is None or name in self._hosts or is_loopback_name(name)


def host_name(authority: bytes) -> bytes:
    """In lower case, without port, brackets, and the dot that ends a full name."""
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
    """A page of ours, or of another server on this machine."""
    parts = _ORIGIN.fullmatch(origin)
    if parts is None:
        return False
    scheme, authority = parts.groups()
    if is_loopback_name(host_name(authority)):
        return True
    usual = _USUAL_PORTS[scheme]
    return host is not None and _whole(authority, usual) == _whole(host, usual)


def _whole(authority: bytes, usual_port: bytes) -> bytes:
    port = _PORT.search(authority)
    named = port[0] if port is not None and len(port[0]) > 1 else usual_port
    return host_name(authority) + named


def _text(value: bytes) -> str:
    return value[:100].decode("ascii", "replace")
