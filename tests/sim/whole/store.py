"""Simulates one incarnation of a store node, and a worker's client for it."""

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
from kvstore.dram_block import DramBlockState
from kvstore.dram_tier import DramTier
from kvstore.index_publisher import IndexPublisher
from kvstore.node import StoreNode
from tests.sim.whole.network import Network, StreamEnd
from tests.sim.whole.process import Process
from tests.sim.whole.registry import SimRegistryClient
from tests.sim.whole.transport import NAME, SimMemory, SimTransport

if TYPE_CHECKING:
    from tests.sim.whole.worker import SimEnvironment

T = TypeVar("T")

STORE_SECONDS = 0.25
BLOCK_BYTES = 32
SWEEP_SECONDS = 1.0


class SimStore:
    """A store node that listens at the address ``name``. Calls run in its process."""

    def __init__(
        self, environment: "SimEnvironment", name: str, host: str, generation: int, dram_blocks: int
    ) -> None:
        self.name = name
        self.host = host
        self.generation = generation
        self.dram_blocks = dram_blocks
        self.process = Process(name, environment.network)
        memory = SimMemory(dram_blocks * BLOCK_BYTES)
        transport = SimTransport(
            environment.fabric, self.process, generation, host, memory, self._may_write
        )
        transports: dict[str, Transport] = {transport.name: transport}  # type: ignore[dict-item]
        size = dram_blocks * BLOCK_BYTES
        self.dram = DramTier(size, size)
        life = Incarnation(generation)
        self.node = StoreNode(life, memory, transports, host, environment.clock, self.dram)  # type: ignore[arg-type]
        publisher = IndexPublisher(
            KvHolder(WorkerId(name), life), self.node, environment.index, environment.clock
        )
        heartbeat = Heartbeat(
            SimRegistryClient(environment.registry, self.process),
            lambda: self.member,
            environment.clock,
        )
        for coroutine in (
            publisher.run(),
            self.node.demoter.run(),
            heartbeat.run(),
            self._sweep(environment),
        ):
            self.process.start_task(coroutine)
        environment.network.listen(self.process, name, self)

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

    async def _sweep(self, environment: "SimEnvironment") -> None:
        """Call ``StoreNode.sweep`` every SWEEP_SECONDS. It ends expired leases and pins, and frees
        the slots of abandoned transfers that have ended."""
        while True:
            await environment.clock.sleep(SWEEP_SECONDS)
            self.node.sweep()

    def check_integrity(self) -> None:
        violation = self.node.stats().violation
        assert not violation, f"{self.name}: {violation}"

    def _may_write(self, span: TransferRange) -> None:
        """Check that a read writes only to slots that are reserved for it."""
        for offset in range(span.local_offset, span.local_offset + span.size_bytes, BLOCK_BYTES):
            slot = self.dram._slot_at.get(offset)
            is_filling = slot is not None and slot.state is DramBlockState.FILLING
            assert is_filling, f"{self.name}: a read writes to offset {offset}, where {slot} is"

    @property
    def is_at_rest(self) -> bool:
        """Whether no block is leased, being filled or referenced."""
        return not self.node.stats(check=False).leased_blocks and not any(
            slot.num_references for slot in self.dram._slot_at.values()
        )

    def describe(self) -> str:
        return f"{self.name}: {self.dram.describe()}"

    def accept(self, kind: str, opening: Any, end: StreamEnd) -> None:
        task = self.process.start_task(self._send_changes(end, *opening))
        end.on_break = task.cancel

    async def _send_changes(self, end: StreamEnd, generation: Incarnation, number: int) -> None:
        async for page in self.node.watch(generation, number):
            end.send(page)


class SimStoreClient:
    """Implements :class:`baton.kv.cluster_store_client.StoreNodeClient` for one incarnation of a
    store node."""

    def __init__(self, process: Process, member: Member) -> None:
        self._process = process
        self._member = member

    async def open(self, transports: Sequence[str], host: str) -> Endpoint:
        async def ask(life: SimStore) -> Endpoint:
            return life.node.endpoint_for(transports, host)

        return await self._call(ask)

    async def put(self, request: PutRequest, timeout_seconds: float | None = None) -> PutResult:
        return await self._call(lambda life: life.node.put(request), timeout_seconds)

    async def lease(self, query: LeaseRequest) -> LeasedBlocks:
        return await self._call(lambda life: life.node.lease(query))

    async def release(self, lease_id: str) -> None:
        async def ask(life: SimStore) -> None:
            life.node.release(lease_id)

        await self._call(ask)

    async def report_damaged(self, keys: Sequence[BlockKey]) -> int:
        return await self._call(lambda life: life.node.report_damaged(keys))

    async def close(self) -> None:
        """Do nothing, because there is nothing to close."""

    async def _call(
        self, ask: Callable[[SimStore], Awaitable[T]], seconds: float | None = None
    ) -> T:
        if not self._process.alive:
            raise Unavailable("the calling process is dead")
        network: Network = self._process.network
        return await network.call(
            self._process, self._member.address, ask, seconds or STORE_SECONDS
        )


def store_client_factory(process: Process) -> Callable[[Member], SimStoreClient]:
    return lambda member: SimStoreClient(process, member)


async def watch(
    process: Process, member: Member, generation: Incarnation, number: int
) -> AsyncIterator[WatchEvent]:
    """Yield a snapshot of the store node's keys, and then its changes, until the stream breaks."""
    end = process.network.open(process, member.address, "watch", (generation, number))
    try:
        while True:
            yield await end.get()
    finally:
        end.close()
