"""Limits the number of connections that are not authenticated yet. When there are too many, the
oldest connection from the network with the most connections is closed. Authentication takes
milliseconds, so members complete it in time."""

from typing import Protocol

from baton.network.address import source_network


class Closable(Protocol):
    def close(self) -> None:
        """Close at once."""
        ...


class UnauthenticatedConnections:
    """The connections that are not authenticated yet: at most ``limit`` in total. When there are
    more, the oldest connection from the source network with the most connections is closed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_network: dict[str, dict[Closable, None]] = {}  # connections from old to new
        self._network_of: dict[Closable, str] = {}

    def __len__(self) -> int:
        return len(self._network_of)

    def add(self, connection: Closable, host: str) -> None:
        """Add a connection from ``host``. If there are too many now, close the oldest connection
        from the network with the most connections."""
        network = source_network(host)
        self._network_of[connection] = network
        self._by_network.setdefault(network, {})[connection] = None
        if len(self) > self._limit:
            largest = max(self._by_network.values(), key=len)
            oldest = next(iter(largest))
            self.discard(oldest)
            oldest.close()

    def close_all(self) -> None:
        for connection in list(self._network_of):
            connection.close()

    def discard(self, connection: Closable) -> None:
        """Remove a connection that is authenticated, or has ended. Idempotent."""
        network = self._network_of.pop(connection, None)
        if network is not None:
            del self._by_network[network][connection]
            if not self._by_network[network]:
                del self._by_network[network]
