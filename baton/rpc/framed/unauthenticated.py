"""Connections that have not proved anything yet: some are kept, and the address that has most of
them gives up its oldest for a newcomer. A proof takes milliseconds, so members get theirs done."""

import ipaddress
from typing import Protocol

V6_SITE_BITS = 64
"""Of an address of IPv6: whoever has one of a site can take any."""


class Closable(Protocol):
    def close(self) -> None:
        """At once."""
        ...


class UnauthenticatedConnections:
    """At most ``limit`` connections, by the addresses that they come from."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_site: dict[str, dict[Closable, None]] = {}  # in the order in which they came
        self._site_of: dict[Closable, str] = {}

    def __len__(self) -> int:
        return len(self._site_of)

    def add(self, connection: Closable, host: str) -> None:
        """Closes the oldest of those that have most, if there are too many with this one."""
        site = source_network(host)
        self._site_of[connection] = site
        self._by_site.setdefault(site, {})[connection] = None
        if len(self) > self._limit:
            greediest = max(self._by_site.values(), key=len)
            oldest = next(iter(greediest))
            self.discard(oldest)
            oldest.close()

    def close_all(self) -> None:
        for connection in list(self._site_of):
            connection.close()

    def discard(self, connection: Closable) -> None:
        """It has proved who it is, or has gone. Idempotent."""
        site = self._site_of.pop(connection, None)
        if site is not None:
            del self._by_site[site][connection]
            if not self._by_site[site]:
                del self._by_site[site]


def source_network(host: str) -> str:
    if ":" not in host:
        return host
    try:
        network = ipaddress.ip_network((host.partition("%")[0], V6_SITE_BITS), strict=False)
    except ValueError:
        return host
    return str(network)
