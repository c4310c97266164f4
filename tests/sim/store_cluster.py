"""Runs the production code of workers and store nodes in one process, over in-memory fakes of the
model, the transport and the network. The fakes inject faults on demand."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry

from baton.core.ids import BlockKey, Incarnation, TokenId, WorkerId
from baton.core.kv_transfer import CHECKSUM_XXH3, Endpoint
from baton.core.member import Member
from baton.core.request import RequestOutput, RequestSpec
from baton.core.states import Role, WorkerState
from baton.core.store import LeasedBlocks, LeaseRequest, PutRequest, PutResult
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine, StepResult
from baton.errors import DeadlineExceeded, Unavailable
from baton.kv.cluster_store_client import ClusterStoreClient
from baton.kv.index import KvHolder
from baton.registry.membership import Membership
from baton.transport.base import Transport
from baton.transport.host_memory import HostMemory
from baton.worker.constraint_opener import ConstraintOpener
from baton.worker.context import WorkerConfig, WorkerContext
from baton.worker.kv_layout import KvLayout
from baton.worker.role_state import RoleState
from baton.worker.telemetry import WorkerTelemetry
from baton.worker.worker import Worker
from decode_worker.handler import DecodeHandler
from decode_worker.kv_import import KvImporter, KvImportTimeouts
from kvstore.disk_tier import DiskTier
from kvstore.dram_tier import DramTier
from kvstore.index_publisher import IndexPublisher
from kvstore.node import StoreNode
from prefill_worker.cluster_prefix_store import ClusterPrefixStore
from prefill_worker.handler import PrefillHandler
from prefill_worker.reload_policy import ReloadMode
from prefill_worker.store_publisher import StorePublisher
from testkit.fakes.kv_index import MemoryKvIndex
from testkit.fakes.kv_transfer import MemoryKvTransferClient
from testkit.fakes.registry import MemoryRegistry
from testkit.fakes.transport import MemoryFabric, MemoryTransport
from tests.sim.virtual_time import LoopClock
from tests.sim.worker_cluster import BLOCK_TOKENS, DIGEST, SharedRunner, collect, is_finished

CALL_SECONDS = 0.2
STEP_SECONDS = 0.01
CLOCK = LoopClock()


class InlineEngineHandle:
    """An ``EngineHandle`` without a thread. It runs commands immediately, and a step every
    ``STEP_SECONDS``."""

    def __init__(self, engine: Engine, on_step: Callable[[StepResult], None]) -> None:
        self._engine = engine
        self._on_step = on_step
        self._wake = asyncio.Event()

    async def call(self, command):  # type: ignore[no-untyped-def]
        self._wake.set()
        return command(self._engine)

    def send(self, command: Callable[[Engine], object]) -> None:
        command(self._engine)
        self._wake.set()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            while self._engine.has_work():
                await CLOCK.sleep(STEP_SECONDS)
                self._on_step(self._engine.step())
                self._engine.check_integrity()
            await self._wake.wait()


@dataclass
class SimStoreNode:
    """One incarnation of a store node, with its SSD tier in ``folder``. Calls to it fail while
    ``is_dead`` is set, and time out while ``is_hung`` is set."""

    name: str
    generation: int
    fabric: MemoryFabric
    folder: Path | None
    dram_blocks: int
    is_dead: bool = False
    is_hung: bool = False
    arena: HostMemory = field(init=False)
    disk: DiskTier | None = field(init=False)
    node: StoreNode = field(init=False)

    def __post_init__(self) -> None:
        size = self.dram_blocks * BLOCK_TOKENS * 8
        self.arena = HostMemory(self.name, size)
        transport = MemoryTransport(self.fabric, self.name, self.generation, CLOCK)
        transport.register(self.arena.region)
        self.disk = DiskTier(self.folder, 128 * 1024, "baton", 64 * 1024) if self.folder else None
        transports: dict[str, Transport] = {"memory": transport}  # type: ignore[dict-item]
        dram_tier = DramTier(size, size)
        life = Incarnation(self.generation)
        self.node = StoreNode(life, self.arena, transports, "here", CLOCK, dram_tier, self.disk)

    @property
    def holder(self) -> KvHolder:
        return KvHolder(WorkerId(self.name), Incarnation(self.generation))

    @property
    def member(self) -> Member:
        return Member(
            WorkerId(self.name),
            Role.KVSTORE,
            self.name,
            Incarnation(self.generation),
            WorkerState.READY,
            host="here",
            transports=("memory",),
        )

    def kill(self) -> None:
        self.is_dead = True
        self.fabric.kill(self.name)
        if self.disk is not None:
            self.disk.close()


class InMemoryStoreClient:
    """Implements :class:`baton.kv.cluster_store_client.StoreNodeClient` without a network."""

    def __init__(self, store: SimStoreNode) -> None:
        self._store = store

    async def open(self, transports: Sequence[str], host: str) -> Endpoint:
        await self._reach()
        return self._store.node.endpoint_for(transports, host)

    async def put(self, request: PutRequest, timeout_seconds: float | None = None) -> PutResult:
        await self._reach(timeout_seconds or CALL_SECONDS)
        return await self._answer(self._store.node.put(request))

    async def lease(self, query: LeaseRequest) -> LeasedBlocks:
        await self._reach()
        return await self._answer(self._store.node.lease(query))

    async def release(self, lease_id: str) -> None:
        await self._reach()
        self._store.node.release(lease_id)

    async def report_damaged(self, keys: Sequence[BlockKey]) -> int:
        await self._reach()
        return await self._answer(self._store.node.report_damaged(keys))

    async def close(self) -> None:
        """Do nothing, because there is nothing to close."""

    async def _reach(self, seconds: float = CALL_SECONDS) -> None:
        await asyncio.sleep(0)
        if self._store.is_dead:
            raise Unavailable(f"store node {self._store.name} is dead")
        if self._store.is_hung:
            await CLOCK.sleep(seconds)
            raise DeadlineExceeded(
                f"store node {self._store.name} did not respond within {seconds:g} s"
            )

    async def _answer(self, call):  # type: ignore[no-untyped-def]
        """Return the result of ``call``. Raises Unavailable if the node has died meanwhile."""
        result = await call
        if self._store.is_dead:
            raise Unavailable(f"store node {self._store.name} died during the call")
        return result


@dataclass
class Node:
    """A worker that serves requests alone: it does both prefill and decode."""

    worker: Worker
    engine: Engine
    engine_handle: InlineEngineHandle
    store: ClusterPrefixStore

    async def generate(self, spec: RequestSpec) -> list[RequestOutput]:
        await asyncio.sleep(0)  # a worker that was added just now can start
        stream = self.worker.open_stream()
        stream.submit(spec, Task.PREFILL_AND_DECODE, None)
        outputs = await collect(stream, is_finished)
        stream.close()
        return outputs


@dataclass
class StoreCluster:
    fabric: MemoryFabric
    index: MemoryKvIndex
    registry: MemoryRegistry
    membership: Membership
    tasks: asyncio.TaskGroup
    stores: dict[str, SimStoreNode] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    background: dict[str, list["asyncio.Task[None]"]] = field(default_factory=dict)

    async def start_store(
        self, name: str, folder: Path | None = None, dram_blocks: int = 32
    ) -> SimStoreNode:
        """Start the store node ``name`` or, if it was started before, its next incarnation."""
        last = self.stores.get(name)
        generation = last.generation + 1 if last else 1
        store = self.stores[name] = SimStoreNode(name, generation, self.fabric, folder, dram_blocks)
        publisher = IndexPublisher(store.holder, store.node, self.index, CLOCK)
        coroutines = [publisher.run(), store.node.demoter.run()]
        self.background[name] = [self.tasks.create_task(each) for each in coroutines]
        await self.registry.announce(store.member, 1e9)
        await self.membership.refresh()
        return store

    def kill_store(self, name: str) -> None:
        """Kill a store node without a drain. Its registry entry remains."""
        for task in self.background.pop(name, []):
            task.cancel()
        self.stores[name].kill()

    def add_worker(self, name: str, num_blocks: int = 64, prefer: ReloadMode | None = None) -> Node:
        runner = SharedRunner(num_blocks)
        config = EngineConfig(
            block_tokens=BLOCK_TOKENS, max_model_tokens=256, max_batched_tokens=16, chunk_tokens=8
        )
        engine = Engine(
            runner,
            config,
            model_digest=DIGEST,
            kv_dtype="fake",
            eos_token_ids=frozenset(),
            clock=CLOCK,
        )
        memory = MemoryTransport(self.fabric, name, 1, CLOCK)
        memory.register(runner.shared.region)
        transports: dict[str, Transport] = {"memory": memory}  # type: ignore[dict-item]
        layout = KvLayout("fake", runner.block_size_bytes, CHECKSUM_XXH3, runner.checksums)  # type: ignore[arg-type]
        engine_handle = InlineEngineHandle(engine, lambda result: worker.on_step(result))
        context = WorkerContext(
            id=WorkerId(name),
            generation=Incarnation(1),
            host="here",
            model_digest=DIGEST,
            config=WorkerConfig(),
            engine=engine_handle,
            engine_config=config,
            key_hasher=engine.key_hasher,
            layout=layout,
            transports=transports,
            clock=CLOCK,
            telemetry=WorkerTelemetry(name, CollectorRegistry(), CLOCK),
        )
        store = self._open_store(context, prefer)
        kv_importer = KvImporter(context, MemoryKvTransferClient(), KvImportTimeouts())
        worker = Worker(
            context,
            PrefillHandler(context, store),
            DecodeHandler(context, kv_importer),
            RoleState(Role.PREFILL),
            ConstraintOpener(),
        )
        for coroutine in (engine_handle.run(), store.run(), worker.run()):
            self.tasks.create_task(coroutine)
        node = Node(worker, engine, engine_handle, store)
        self.nodes.append(node)
        return node

    def _open_store(self, context: WorkerContext, prefer: ReloadMode | None) -> ClusterPrefixStore:
        client = ClusterStoreClient(
            self.membership, self.index, context.transports, self._link, "here", CLOCK, CALL_SECONDS
        )
        return ClusterPrefixStore(
            context.engine,
            client,
            StorePublisher(context.engine, client, context.layout, DIGEST[:16]),
            context.layout,
            context.engine_config,
            CLOCK,
            CALL_SECONDS,
            prefer,
        )

    async def run_for(self, seconds: float = 1.0) -> None:
        """Let background tasks run for ``seconds`` of the loop's virtual time."""
        await CLOCK.sleep(seconds)

    def check_integrity(self) -> None:
        """Check the integrity of all workers and living store nodes, and that every worker is idle
        and pins no block."""
        for node in self.nodes:
            node.engine.check_integrity()
            counts = node.engine.stats().pool
            assert not (counts.referenced or counts.filling or counts.quarantined), counts
            assert node.worker.is_idle
        for store in self.stores.values():
            if not store.is_dead:
                assert not store.node.stats().violation

    def _link(self, member: Member) -> InMemoryStoreClient:
        store = self.stores[member.id]
        if store.generation != member.generation:
            raise Unavailable(
                f"store node {member.id} has restarted: its generation is {store.generation}, "
                f"not {member.generation}"
            )
        return InMemoryStoreClient(store)


class _TestEnded(Exception):
    """Raised within the cluster's task group when the test has ended, so that the task group
    cancels all background tasks."""


@asynccontextmanager
async def store_cluster() -> AsyncIterator[StoreCluster]:
    registry = MemoryRegistry(CLOCK)
    membership = Membership(registry, CLOCK)
    try:
        async with asyncio.TaskGroup() as tasks:
            cluster = StoreCluster(MemoryFabric(), MemoryKvIndex(), registry, membership, tasks)
            yield cluster
            for store in cluster.stores.values():
                if not store.is_dead:
                    store.kill()
            raise _TestEnded
    except* _TestEnded:
        pass


def tokens(first: int, count: int) -> list[TokenId]:
    return [TokenId((first + 7 * position) % 251) for position in range(count)]
