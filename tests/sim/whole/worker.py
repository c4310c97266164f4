"""One life of a worker: its production code, as ``baton.worker.program`` puts it together."""

from dataclasses import dataclass, field, replace
from functools import lru_cache

from prometheus_client import CollectorRegistry

from baton.clock import SystemClock
from baton.core.credentials import ClusterCredentials
from baton.core.ids import BlockId, Incarnation, WorkerId
from baton.core.kv_transfer import CHECKSUM_XXH3
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.engine.block_state import BlockState
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.executor import SyncExecutor
from baton.kv.cluster_store_client import ClusterStoreClient
from baton.kv.memory_index import MemoryKvIndex
from baton.registry.heartbeat import Heartbeat
from baton.registry.membership import Membership
from baton.rpc.framed.worker_service import framed_worker_services
from baton.transport.base import TransferRange, Transport
from baton.worker.cluster_prefix_store import ClusterPrefixStore
from baton.worker.kv_import import KvImporter, KvImportTimeouts
from baton.worker.kv_layout import KvLayout
from baton.worker.prefix_store import PrefixStore
from baton.worker.reload_policy import ReloadMode
from baton.worker.store_publisher import StorePublisher
from baton.worker.telemetry import WorkerTelemetry
from baton.worker.worker import Worker, WorkerConfig
from tests.sim.no_store import NoStore
from tests.sim.whole.chance import Chance
from tests.sim.whole.clients import Answer
from tests.sim.whole.engine_door import BLOCK_TOKENS, SimDoor, SimRunner, StepClock
from tests.sim.whole.lines import serve_lines
from tests.sim.whole.loop import SimClock
from tests.sim.whole.network import Network
from tests.sim.whole.peers import SimPeers, WorkerServer
from tests.sim.whole.process import Process
from tests.sim.whole.registry import RegistryHouse, RegistryLink
from tests.sim.whole.store import STORE_SECONDS, store_link
from tests.sim.whole.transport import NAME, Fabric, SimTransport

DIGEST = b"m" * 16
MAX_MODEL_TOKENS = 128
ENGINE = EngineConfig(
    block_tokens=BLOCK_TOKENS,
    max_model_tokens=MAX_MODEL_TOKENS,
    max_step_tokens=16,
    chunk_tokens=8,
    growth_tokens=16,
)
INTAKE = KvImportTimeouts(queue_seconds=5, chunk_seconds=5, read_seconds=0.5, reserve_seconds=5)
WORKER = WorkerConfig(hold_seconds=4.0, finish_seconds=0.1, arrival_seconds=1.0, late_tokens=16)


@dataclass(frozen=True)
class House:
    """What every process of a cluster finds around it."""

    network: Network
    fabric: Fabric
    registry: RegistryHouse
    index: MemoryKvIndex
    clock: SimClock
    chance: Chance
    has_stores: bool
    trust: ClusterCredentials
    answers: dict[str, Answer] = field(default_factory=dict)
    """Of all clients, by request."""


@dataclass(frozen=True)
class WorkerPlan:
    """What does not change from one life to the next."""

    name: str
    role: Role
    host: str
    num_blocks: int
    slowness: float
    prefer: ReloadMode | None


class WorkerLife:
    def __init__(
        self, house: House, plan: WorkerPlan, generation: int, address: str, line: str
    ) -> None:
        self.plan = plan
        self.generation = generation
        self.address = address
        self.line = line
        self.process = Process(plan.name, house.network)
        self._house = house
        self._registry = RegistryLink(house.registry, self.process)
        self._membership = Membership(self._registry, house.clock)
        self._looks = False
        clock = StepClock(house.network.loop)
        runner = SimRunner(plan.num_blocks, clock, plan.slowness)
        self.engine = Engine(
            runner,
            ENGINE,
            model_digest=DIGEST,
            kv_dtype="fake",
            eos_token_ids=frozenset(),
            clock=clock,
            pipeline=SyncExecutor(runner) if plan.role is Role.DECODE else None,
        )
        self._build(runner, clock)
        self._heartbeat = Heartbeat(self._registry, self._member, house.clock)
        for work in (self.worker.run(), self.store.run(), self._heartbeat.run()):
            self.process.spawn(work)
        if house.has_stores:
            self.process.spawn(self._membership.run())
        house.network.listen(self.process, address, WorkerServer(self.process, self.worker))
        self.lines = (
            serve_lines(house, self.process, line, framed_worker_services(self.worker))
            if line
            else None
        )

    def _build(self, runner: SimRunner, clock: StepClock) -> None:
        house, plan = self._house, self.plan
        transport = SimTransport(
            house.fabric, self.process, self.generation, plan.host, runner.shared, self._may_write
        )
        transports: dict[str, Transport] = {transport.name: transport}  # type: ignore[dict-item]
        layout = KvLayout("fake", runner.block_size_bytes, CHECKSUM_XXH3, runner.checksums)  # type: ignore[arg-type]
        door = SimDoor(
            house.network.loop,
            self.engine,
            clock,
            lambda result: self.worker.on_step(result),
            house.chance,
        )
        self.store = self._build_store(door, transports, layout)
        intake = KvImporter(
            door, SimPeers(self.process), transports, layout, DIGEST.hex(), plan.host,
            house.clock, INTAKE,
        )  # fmt: skip
        self.worker = Worker(
            WorkerId(plan.name), Incarnation(self.generation), WORKER, door, intake, self.store,
            layout, transports, self.engine.keys, DIGEST.hex(), plan.host, house.clock,
            self._has_heirs, plan.role, self._hurry, witness=_witness(),
        )  # fmt: skip

    def _build_store(
        self, door: SimDoor, transports: dict[str, Transport], layout: KvLayout
    ) -> PrefixStore:
        house, host = self._house, self.plan.host
        if not house.has_stores:
            return NoStore()
        client = ClusterStoreClient(
            self._membership, house.index, transports, store_link(self.process), host,
            house.clock, STORE_SECONDS,
        )  # fmt: skip
        publisher = StorePublisher(door, client, layout, DIGEST[:16])
        return ClusterPrefixStore(
            door, client, publisher, layout, BLOCK_TOKENS, ENGINE.chunk_limit, house.clock,
            STORE_SECONDS, self.plan.prefer,
        )  # fmt: skip

    # -- its end ---------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        alive = self.process.alive and not self.process.frozen
        return alive and self.worker.state is WorkerState.READY

    def _has_heirs(self) -> bool:
        """As ``baton.worker.program`` has it."""
        ready = [*self._membership.ready(Role.PREFILL), *self._membership.ready(Role.DECODE)]
        return any(member.id != self.plan.name for member in ready)

    def convert(self) -> None:
        """To the other pool; its next lives are there, too."""
        role = Role.DECODE if self.plan.role is Role.PREFILL else Role.PREFILL
        self.plan = replace(self.plan, role=role)
        self._look_for_heirs()
        self.worker.convert(role)

    def _look_for_heirs(self) -> None:
        """Where there are stores, it does so all the time."""
        if not (self._house.has_stores or self._looks):
            self._looks = True
            self.process.spawn(self._membership.run())

    def _hurry(self) -> None:
        self._heartbeat.hurry()

    async def drain(self) -> None:
        """As ``serve`` does on SIGTERM; ends when its last request has."""
        self._look_for_heirs()
        self.worker.start_drain()
        self._heartbeat.hurry()
        while not self.worker.idle:
            await self._house.clock.sleep(0.05)

    async def leave(self) -> None:
        await self.drain()
        await self._registry.withdraw(WorkerId(self.plan.name), Incarnation(self.generation))
        if self.lines is not None:
            await self.lines.close()

    # -- its books -------------------------------------------------------------------------

    def check_books(self) -> None:
        """At any moment."""
        self.engine.check_integrity()
        assert len(self.worker._jobs) <= WORKER.max_jobs, f"{self.plan.name} took too many"
        jobs = [job.request_id for job in self.worker._jobs.values()]
        assert len(jobs) == len(set(jobs)), f"{self.plan.name} has two placements of a request"

    @property
    def is_at_rest(self) -> bool:
        counts = self.engine.stats().pool
        held = counts.referenced or counts.filling or counts.quarantined
        waits = self.worker._current or self.worker._intake._room
        return self.worker.idle and not (held or waits or self.engine.has_work())

    def describe(self) -> str:
        return f"{self.plan.name}: {self.engine.stats()} {list(self.worker._jobs)}"

    def _may_write(self, span: TransferRange) -> None:
        """Reads land in blocks that wait for them, and in no others."""
        size = BLOCK_TOKENS * 8
        first, end = span.local_offset // size, (span.local_offset + span.size_bytes) // size
        for block_id in range(first, end):
            state = self.engine._pool.state(BlockId(block_id))
            waits = state in (BlockState.FILLING, BlockState.QUARANTINED)
            assert waits, f"{self.plan.name}: a read writes to block {block_id}, which is {state}"

    def _member(self) -> Member:
        return Member(
            id=WorkerId(self.plan.name),
            role=self.worker.role,
            address=self.address,
            generation=Incarnation(self.generation),
            state=self.worker.state,
            host=self.plan.host,
            model="toy",
            model_digest=DIGEST.hex(),
            block_tokens=BLOCK_TOKENS,
            kv_dtype="fake",
            kv_bytes_per_token=8,
            device="toy",
            max_model_tokens=MAX_MODEL_TOKENS,
            transports=(NAME,),
            line=self.line,
            load=self.worker.load,
        )


@lru_cache
def _witness() -> WorkerTelemetry:
    """One for all workers and runs: nobody looks at it, and a new one takes milliseconds."""
    return WorkerTelemetry("all", CollectorRegistry(), SystemClock())
