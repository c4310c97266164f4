"""Framed connections of simulated processes, over :mod:`tests.sim.whole.sockets`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from baton.rpc.framed.server import FramedServer, FramedServiceFactory
from tests.sim.whole.process import Process

if TYPE_CHECKING:
    from tests.sim.whole.worker import SimEnvironment


class OrderedSet(dict[Any, None]):
    """A set that iterates in insertion order, so that runs are the same in every real process."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


def serve_framed(
    environment: "SimEnvironment",
    process: Process,
    address: str,
    services: Mapping[str, FramedServiceFactory],
) -> FramedServer:
    server = FramedServer(environment.credentials, services)
    server.connections = OrderedSet()  # type: ignore[assignment]
    host, _, port = address.rpartition(":")
    process.start_task(_listen(server, host, int(port)))
    return server


async def _listen(server: FramedServer, host: str, port: int) -> None:
    await server.listen(host, port)
