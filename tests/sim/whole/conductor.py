"""Simulates one incarnation of a conductor, assembled as in ``conductor.program``."""

from functools import partial
from typing import TYPE_CHECKING

from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.registry.heartbeat import Heartbeat
from baton.registry.membership import Membership
from baton.rpc.conductor_service import framed_conductor_services
from conductor.conductor import ConductorConfig
from conductor.model_conductors import ModelConductors
from conductor.store_mirror import StoreMirror, StoreWatcher
from tests.sim.whole.framed_connections import serve_framed
from tests.sim.whole.process import Process
from tests.sim.whole.registry import SimRegistryClient
from tests.sim.whole.store import watch

if TYPE_CHECKING:
    from tests.sim.whole.worker import SimEnvironment

CONFIG = ConductorConfig(admission=False)


class SimConductor:
    """A conductor. It serves placements over framed connections at the address ``line``."""

    def __init__(
        self, environment: "SimEnvironment", name: str, generation: int, line: str
    ) -> None:
        self.name = name
        self.generation = generation
        self.line = line
        self.process = Process(name, environment.network)
        registry = SimRegistryClient(environment.registry, self.process)
        membership = Membership(registry, environment.clock)
        mirror = StoreMirror()
        self.conductor = ModelConductors(membership, mirror, environment.clock, CONFIG)
        heartbeat = Heartbeat(registry, self._member, environment.clock)
        for coroutine in (membership.run(), heartbeat.run()):
            self.process.start_task(coroutine)
        if environment.has_stores:
            watchers = StoreWatcher(
                mirror, membership, partial(watch, self.process), environment.clock
            )
            self.process.start_task(watchers.run())
        serve_framed(environment, self.process, line, framed_conductor_services(self.conductor))

    def _member(self) -> Member:
        return Member(
            WorkerId(self.name),
            Role.CONDUCTOR,
            self.name,
            Incarnation(self.generation),
            WorkerState.READY,
            framed_address=self.line,
        )
