"""Lines of simulated processes: production code over :mod:`tests.sim.whole.sockets`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from baton.rpc.framed.server import FramedServer, FramedServiceFactory
from tests.sim.whole.chance import Chance
from tests.sim.whole.network import Network
from tests.sim.whole.process import Process
from tests.sim.whole.sockets import Wall

if TYPE_CHECKING:
    from tests.sim.whole.worker import House

OLDER, REFUSED, SWALLOWED = 0.1, 0.05, 0.03
"""How many members have no line, or one behind a firewall: routers use gRPC there."""


class InOrder(dict[Any, None]):
    """A set whose order is that of entry, in every process."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


def draw_line(chance: Chance, network: Network, address: str) -> str:
    """The address, which may be walled off; or none."""
    luck = chance.number()
    if luck < OLDER:
        return ""
    if luck < OLDER + REFUSED:
        network.walls[address] = Wall.REFUSES
    elif luck < OLDER + REFUSED + SWALLOWED:
        network.walls[address] = Wall.SWALLOWS
    return address


def serve_lines(
    house: "House", process: Process, address: str, services: Mapping[str, FramedServiceFactory]
) -> FramedServer:
    server = FramedServer(house.trust, services)
    server.lines = InOrder()  # type: ignore[assignment]
    host, _, port = address.rpartition(":")
    process.spawn(_listen(server, host, int(port)))
    return server


async def _listen(server: FramedServer, host: str, port: int) -> None:
    await server.listen(host, port)
