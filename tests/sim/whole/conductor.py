"""One life of a conductor, as ``conductor.program`` puts it together."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from baton.core.ids import BlockKey, Generation, WorkerId
from baton.core.member import Member
from baton.core.placement import Placement
from baton.core.states import Role, WorkerState
from baton.registry.heartbeat import Heartbeat
from baton.registry.membership import Membership
from conductor.conductor import Conductor, ConductorConfig
from conductor.mirror import Mirror, Watchers
from tests.sim.whole.peers import SimChannel
from tests.sim.whole.process import PROCESS, Process
from tests.sim.whole.registry import RegistryLink
from tests.sim.whole.store import watch

if TYPE_CHECKING:
    from tests.sim.whole.worker import House

CONFIG = ConductorConfig(admission=False)


class ConductorLife:
    """Listens as itself."""

    def __init__(self, house: "House", name: str, generation: int) -> None:
        self.name = name
        self.generation = generation
        self.process = Process(name, house.network)
        registry = RegistryLink(house.registry, self.process)
        membership = Membership(registry, house.clock)
        mirror = Mirror()
        self.conductor = Conductor(membership, mirror, house.clock, CONFIG)
        heartbeat = Heartbeat(registry, self._member, house.clock)
        for work in (membership.run(), heartbeat.run()):
            self.process.spawn(work)
        if house.has_stores:
            watchers = Watchers(mirror, membership, partial(watch, self.process), house.clock)
            self.process.spawn(watchers.run())
        house.network.listen(self.process, name, self)

    async def place(self, **query: Any) -> Placement:
        return self.conductor.place(**query)

    def accept(self, kind: str, opening: Any, end: Any) -> None:
        raise AssertionError("a conductor has no streams")

    def _member(self) -> Member:
        return Member(
            WorkerId(self.name),
            Role.CONDUCTOR,
            self.name,
            Generation(self.generation),
            WorkerState.READY,
        )


async def ask_placement(
    channel: SimChannel,
    *,
    request_id: str,
    epoch: int,
    tenant: str,
    num_tokens: int,
    max_new_tokens: int,
    block_keys: Sequence[BlockKey],
    excluded: Iterable[str],
    model: str,
    timeout_seconds: float,
    trace: str = "",
    session: str = "",
    stream: object = None,
) -> Placement:
    """As ``baton.rpc.conductor_client.ask_placement``."""
    process = PROCESS.get()

    def ask(life: ConductorLife) -> Any:
        return life.place(
            request_id=request_id,
            epoch=epoch,
            num_tokens=num_tokens,
            max_new_tokens=max_new_tokens,
            keys=tuple(block_keys),
            excluded=frozenset(excluded),
            trace=trace,
        )

    placement: Placement = await process.network.call(
        process, channel.address, ask, timeout_seconds
    )
    return placement
