"""One life of a store node, and a worker's way to it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.kv_transfer import Endpoint
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.store import LeasedBlocks, LeaseRequest, PutRequest, PutResult, WatchEvent
from baton.errors import Unavailable
from baton.kv.index import KvHolder
from baton.registry.heartbeat import Heartbeat
from baton.transport.base import TransferRange, Transport
from kvstore.dram_tier import DramBlockState, DramTier
from kvstore.index_publisher import IndexPublisher
from kvstore.node import StoreNode
from tests.sim.whole.network import End, Network
from tests.sim.whole.process import Process
from tests.sim.whole.registry import RegistryLink
from tests.sim.whole.transport import NAME, SimMemory, SimTransport

if TYPE_CHECKING:
    from tests.sim.whole.worker import House

T = TypeVar("T")

STORE_SECONDS = 0.25
BLOCK_BYTES = 32
SWEEP_SECONDS = 1.0


class StoreLife:
    """Listens as itself: calls of it run in its process."""

    def __init__(self, house: "House", name: str, host: str, generation: int, room: int) -> None:
        self.name = name
        self.host = host
        self.generation = generation
        self.room = room
        self.process = Process(name, house.network)
        memory = SimMemory(room * BLOCK_BYTES)
        transport = SimTransport(
            house.fabric, self.process, generation, host, memory, self._may_write
        )
        transports: dict[str, Transport] = {transport.name: transport}  # type: ignore[dict-item]
        size = room * BLOCK_BYTES
        self.shelf = DramTier(size, size)
        life = Incarnation(generation)
        self.node = StoreNode(life, memory, transports, host, house.clock, self.shelf)  # type: ignore[arg-type]
        publisher = IndexPublisher(
            KvHolder(WorkerId(name), life), self.node, house.index, house.clock
        )
        heartbeat = Heartbeat(
            RegistryLink(house.registry, self.process), lambda: self.member, house.clock
        )
        works = (publisher.run(), self.node.demotion.run(), heartbeat.run(), self._sweep(house))
        for work in works:
            self.process.spawn(work)
        house.network.listen(self.process, name, self)

    @property
    def member(self) -> Member:
        return Member(
            WorkerId(self.name),
            Role.KVSTORE,
            self.name,
            Incarnation(self.generation),
            WorkerState.READY,
            host=self.host,
            transports=(NAME,),
        )

    async def _sweep(self, house: "House") -> None:
        """As ``kvstore.program`` does."""
        while True:
            await house.clock.sleep(SWEEP_SECONDS)
            self.node.sweep()

    def check_books(self) -> None:
        violation = self.node.stats().violation
        assert not violation, f"{self.name}: {violation}"

    def _may_write(self, span: TransferRange) -> None:
        """Reads land in slots that wait for them, and in no others."""
        for offset in range(span.local_offset, span.local_offset + span.size_bytes, BLOCK_BYTES):
            slot = self.shelf._at.get(offset)
            waits = slot is not None and slot.state is DramBlockState.FILLING
            assert waits, f"{self.name}: a read writes to offset {offset}, to {slot}"

    @property
    def is_at_rest(self) -> bool:
        """Nothing is leased, filled or held."""
        return not self.node.stats(check=False).leased_blocks and not any(self.shelf._held.values())

    def describe(self) -> str:
        return f"{self.name}: {self.shelf.describe()}"

    def accept(self, kind: str, opening: Any, end: End) -> None:
        task = self.process.spawn(self._tell(end, *opening))
        end.on_break = task.cancel

    async def _tell(self, end: End, generation: Incarnation, number: int) -> None:
        async for page in self.node.watch(generation, number):
            end.send(page)


class StoreLink:
    """Implements :class:`baton.kv.cluster_store_client.StoreNodeClient`; the life that it was made
    for."""

    def __init__(self, process: Process, member: Member) -> None:
        self._process = process
        self._member = member

    async def open(self, transports: Sequence[str], host: str) -> Endpoint:
        async def ask(life: StoreLife) -> Endpoint:
            return life.node.endpoint_for(transports, host)

        return await self._call(ask)

    async def put(self, request: PutRequest, timeout_seconds: float | None = None) -> PutResult:
        return await self._call(lambda life: life.node.put(request), timeout_seconds)

    async def lease(self, query: LeaseRequest) -> LeasedBlocks:
        return await self._call(lambda life: life.node.lease(query))

    async def release(self, lease_id: str) -> None:
        async def ask(life: StoreLife) -> None:
            life.node.release(lease_id)

        await self._call(ask)

    async def report(self, keys: Sequence[BlockKey]) -> int:
        return await self._call(lambda life: life.node.report(keys))

    async def close(self) -> None:
        """Nothing is held."""

    async def _call(
        self, ask: Callable[[StoreLife], Awaitable[T]], seconds: float | None = None
    ) -> T:
        if not self._process.alive:
            raise Unavailable("nothing leaves a dead process")
        network: Network = self._process.network
        return await network.call(
            self._process, self._member.address, ask, seconds or STORE_SECONDS
        )


def store_link(process: Process) -> Callable[[Member], StoreLink]:
    return lambda member: StoreLink(process, member)


async def watch(
    process: Process, member: Member, generation: Incarnation, number: int
) -> AsyncIterator[WatchEvent]:
    """As ``KvStoreClient.watch``: the node's changes until the stream breaks."""
    end = process.network.open(process, member.address, "watch", (generation, number))
    try:
        while True:
            yield await end.get()
    finally:
        end.close()
