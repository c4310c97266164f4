"""Framed connections of simulated processes, over :mod:`tests.sim.whole.sockets`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from baton.rpc.framed.server import FramedServer, FramedServiceFactory
from tests.sim.whole.network import Network
from tests.sim.whole.process import Process
from tests.sim.whole.seeded_random import SeededRandom
from tests.sim.whole.sockets import Firewall

if TYPE_CHECKING:
    from tests.sim.whole.worker import SimEnvironment

OLDER, REFUSED, SWALLOWED = 0.1, 0.05, 0.03
"""The fractions of members that don't serve framed connections (like an older version), or that
are behind a firewall that refuses or swallows them. Routers use gRPC for these members."""


class OrderedSet(dict[Any, None]):
    """A set that iterates in insertion order, so that runs are the same in every real process."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


def draw_framed_address(chance: SeededRandom, network: Network, address: str) -> str:
    """Draw the address at which a member serves framed connections. Return "" if it serves none,
    like a member of an older version. Otherwise, return ``address``, which is put behind a firewall
    in some cases."""
    draw = chance.number()
    if draw < OLDER:
        return ""
    if draw < OLDER + REFUSED:
        network.firewalls[address] = Firewall.REFUSES
    elif draw < OLDER + REFUSED + SWALLOWED:
        network.firewalls[address] = Firewall.SWALLOWS
    return address


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
