"""A router without its HTTP: journeys, links, placers and its picture of the cluster."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

from baton.core.ids import TenantId
from baton.core.request import RequestSpec
from router.attempt import Deadlines
from router.cluster import WORKER_ROLES, Cluster
from router.conductors import ConductorPlacer
from router.journey import Guide, Journey, JourneyConfig
from router.key_chain import keys_of
from router.links import WorkerLinks
from router.placement import FirstThatAnswers
from router.record import JourneyRecord
from router.ring import RingPlacer
from tests.sim.whole import peers
from tests.sim.whole.conductor import ask_placement
from tests.sim.whole.process import Process
from tests.sim.whole.registry import RegistryLink

if TYPE_CHECKING:
    from tests.sim.whole.worker import House

JOURNEY = JourneyConfig(deadlines=Deadlines(first_token=5.0, handoff=5.0, token_gap=1.5))


class RouterLife:
    """Its production code talks to the network where it would talk to gRPC; see :func:`wired`."""

    def __init__(self, house: "House", name: str, max_model_tokens: int) -> None:
        self.process = Process(name, house.network)
        self._clock = house.clock
        self.cluster = Cluster(
            RegistryLink(house.registry, self.process), house.clock, max_model_tokens
        )
        self.links = WorkerLinks()
        conductors = ConductorPlacer(
            self.cluster,
            house.clock,
            None,
            lambda address, secret: peers.SimChannel(address),  # type: ignore[arg-type, return-value]
        )
        placer = FirstThatAnswers([conductors, RingPlacer(self.cluster)])
        self._guide = Guide(placer, self.links, house.clock, JOURNEY)
        self._started = self.process.spawn(self._start())

    async def _start(self) -> None:
        """It takes requests once it knows a worker, as its ``/ready`` says."""
        await self.cluster.refresh()
        while not any(self.cluster.ready(role) for role in WORKER_ROLES):
            await self._clock.sleep(0.1)
            await self.cluster.refresh()
        for work in (self.links.run(), self.cluster.run()):
            self.process.spawn(work)

    async def journey(self, spec: RequestSpec) -> Journey:
        await asyncio.wait([self._started])
        chain = self.cluster.key_chain(spec.tenant_salt)
        keys = await keys_of(chain, spec.token_ids)
        record = JourneyRecord(spec.request_id, self._clock.monotonic(), spec.num_prompt_tokens)
        tenant = TenantId("tenant")
        return Journey(self._guide, spec, tenant, "toy", chain, keys, record)


@contextmanager
def wired() -> Iterator[None]:
    """While it lasts, routers reach workers and conductors over the simulated network."""
    with (
        patch("router.grpc_link.open_channel", peers.open_channel),
        patch("router.grpc_link._connected", peers.connected),
        patch("router.grpc_link.converse", peers.converse),
        patch("router.conductors.ask_placement", ask_placement),
    ):
        yield
