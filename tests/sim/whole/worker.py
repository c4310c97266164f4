"""Simulates one incarnation of a worker: its production code, assembled as in
``baton.worker.program``."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from prometheus_client import CollectorRegistry

from baton.clock import SystemClock
from baton.core.adapter import WorkerAdapter
from baton.core.credentials import ClusterCredentials
from baton.core.ids import BlockId, Incarnation, WorkerId
from baton.core.kv_codec import ENCODED_ALIGNMENT_BYTES, KvCodecName
from baton.core.kv_transfer import CHECKSUM_XXH3
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.store import RAW_ONLY
from baton.core.worker_kinds import WORKER_KINDS
from baton.engine.block_state import BlockState
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.executor import SyncExecutor
from baton.engine.lora.table import LoadedAdapter
from baton.kv.cluster_store_client import ClusterStoreClient
from baton.registry.heartbeat import Heartbeat
from baton.registry.membership import Membership
from baton.rpc.worker_service import framed_worker_services
from baton.transport.base import TransferRange, Transport
from baton.worker.block_encoder import BlockEncoder
from baton.worker.block_reader import BlockReader
from baton.worker.constraint_opener import ConstraintOpener
from baton.worker.context import WorkerConfig, WorkerContext
from baton.worker.job import Job
from baton.worker.kv_layout import KvLayout
from baton.worker.role_state import RoleState
from baton.worker.sides import KvExports
from baton.worker.staging_area import StagingArea
from baton.worker.telemetry import WorkerTelemetry
from baton.worker.worker import Worker
from decode_worker.handler import DecodeHandler
from decode_worker.kv_import import KvImporter, KvImportTimeouts
from prefill_worker.cluster_prefix_store import ClusterPrefixStore
from prefill_worker.handler import PrefillHandler
from prefill_worker.prefix_store import PrefixStore
from prefill_worker.reload_policy import ReloadMode
from prefill_worker.store_encoder import StoreEncoder
from prefill_worker.store_publisher import StorePublisher
from testkit.fakes.kv_index import MemoryKvIndex
from tests.sim.no_store import NoStore
from tests.sim.table_codec import TableCodec
from tests.sim.whole.clients import ADAPTERS, ClientResponse
from tests.sim.whole.engine_handle import BLOCK_TOKENS, SimEngineHandle, SimRunner, StepClock
from tests.sim.whole.framed_connections import serve_framed
from tests.sim.whole.loop import SimClock
from tests.sim.whole.network import Network
from tests.sim.whole.peers import SimPeers, WorkerServer
from tests.sim.whole.process import Process
from tests.sim.whole.registry import SimRegistryClient, SimRegistryServer
from tests.sim.whole.seeded_random import SeededRandom
from tests.sim.whole.store import STORE_SECONDS, store_client_factory
from tests.sim.whole.transport import NAME, Fabric, SimTransport

DIGEST = b"m" * 16
NEW_DIGEST = b"n" * 16
"""The digest of the model's new weights, in runs in which they are rolled out."""

ROLLOUT_SEEDS = 3
"""New weights are rolled out in one of this many seeds."""

WEIGHTS = {DIGEST: b"", NEW_DIGEST: b"new"}
"""The weights of :class:`testkit.fakes.runner.FakeRunner`, by the model's digest."""

MAX_MODEL_TOKENS = 128
ENGINE = EngineConfig(
    block_tokens=BLOCK_TOKENS,
    max_model_tokens=MAX_MODEL_TOKENS,
    max_batched_tokens=16,
    chunk_tokens=8,
    growth_tokens=16,
)
WINDOWED = replace(ENGINE, window_tokens=10)
GROUPED = replace(ENGINE, window_tokens=10, num_full_groups=1, num_windowed_groups=2)
ENGINES = (ENGINE, ENGINE, ENGINE, WINDOWED, GROUPED)
"""The engines' settings by the remainder of a run's seed: models without windows, with a window in
all layers, and with three groups of layers."""

ENCODING_SEEDS = 4
"""KV is encoded on its way to decode workers in one of this many seeds, and in the store in two."""

LAYOUT = "float32[1x2x4x1x1]"
"""A layout whose blocks are as large as those of the engine, and have codecs."""

WITHOUT_CODECS = "2"
"""The end of the names of workers that have no codecs, like workers of an older version."""

STAGING_BYTES = 12 * ENCODED_ALIGNMENT_BYTES
"""Enough for nine exported blocks, so that exports often wait for space."""

IMPORT_TIMEOUTS = KvImportTimeouts(read_seconds=0.5, staging_seconds=2)
WORKER = WorkerConfig(
    export_timeout_seconds=4.0,
    drain_grace_seconds=0.1,
    arrival_timeout_seconds=1.0,
    reserve_ahead_tokens=16,
)


@dataclass(frozen=True)
class SimEnvironment:
    """The network, registry, clock and other objects that all processes of a cluster share."""

    network: Network
    fabric: Fabric
    registry: SimRegistryServer
    index: MemoryKvIndex
    clock: SimClock
    chance: SeededRandom
    has_stores: bool
    credentials: ClusterCredentials
    engine_config: EngineConfig = ENGINE
    answers: dict[str, ClientResponse] = field(default_factory=dict)
    """The responses of all clients, by request id."""
    encodes_transfers: bool = False
    """True if KV blocks are encoded for their way to the decode worker."""
    encodes_stored: bool = False
    """True if KV blocks are encoded for the store."""
    encoded: dict[bytes, bytes] = field(default_factory=dict)
    """The table of the codec of all workers (:class:`TableCodec`)."""


def engine_of(seed: int) -> EngineConfig:
    """Return the settings of the engines in the run with that seed."""
    return ENGINES[seed % len(ENGINES)]


def _encode_exports(exports: KvExports) -> None:
    """Let all exports use the codec, as if placement had chosen it for each request."""
    open_export = exports.open

    def open_encoded(job: Job, num_tokens: int, on_close: Callable[[bool], None]) -> None:
        job.spec = replace(job.spec, kv_codec=KvCodecName.LOSSLESS)
        open_export(job, num_tokens, on_close)

    exports.open = open_encoded  # type: ignore[method-assign]


@dataclass(frozen=True)
class WorkerPlan:
    """The properties of a worker that all its incarnations share. While new weights are rolled out,
    the next incarnation has the new ones."""

    name: str
    role: Role
    host: str
    num_blocks: int
    slowness: float
    prefer: ReloadMode | None
    model_digest: bytes = DIGEST


class SimWorker:
    """One incarnation of a worker in its own simulated process."""

    def __init__(
        self,
        environment: SimEnvironment,
        plan: WorkerPlan,
        generation: int,
        address: str,
        line: str,
    ) -> None:
        self.plan = plan
        self.generation = generation
        self.address = address
        self.framed_address = line
        self.process = Process(plan.name, environment.network)
        self._environment = environment
        self._registry = SimRegistryClient(environment.registry, self.process)
        self._membership = Membership(self._registry, environment.clock)
        self._follows_members = False
        clock = StepClock(environment.network.loop)
        config = environment.engine_config
        encodes = environment.encodes_transfers or environment.encodes_stored
        self._has_codecs = encodes and not plan.name.endswith(WITHOUT_CODECS)
        staging_bytes = STAGING_BYTES if self._has_codecs else 0
        weights = WEIGHTS[plan.model_digest]
        runner = SimRunner(plan.num_blocks, config, clock, plan.slowness, staging_bytes, weights)
        self._staging_offset = runner.staging_offset
        self.staging = StagingArea(self._staging_offset, staging_bytes) if staging_bytes else None
        self.engine = Engine(
            runner,
            config,
            model_digest=plan.model_digest,
            kv_dtype="fake",
            eos_token_ids=frozenset(),
            clock=clock,
            executor=SyncExecutor(runner) if plan.role is Role.DECODE else None,
        )
        for adapter in ADAPTERS:
            self.engine.add_adapter(LoadedAdapter(adapter.digest, None))
        self._build(runner, clock)
        self._heartbeat = Heartbeat(self._registry, self._member, environment.clock)
        for coroutine in (self.worker.run(), self.store.run(), self._heartbeat.run()):
            self.process.start_task(coroutine)
        if environment.has_stores:
            self.process.start_task(self._membership.run())
        environment.network.listen(self.process, address, WorkerServer(self.process, self.worker))
        self.framed_server = serve_framed(
            environment, self.process, line, framed_worker_services(self.worker)
        )

    def _build(self, runner: SimRunner, clock: StepClock) -> None:
        environment, plan = self._environment, self.plan
        transport = SimTransport(
            environment.fabric,
            self.process,
            self.generation,
            plan.host,
            runner.shared,
            self._reserved_for,
        )
        transports: dict[str, Transport] = {transport.name: transport}  # type: ignore[dict-item]
        layout = KvLayout(
            LAYOUT,
            runner.block_size_bytes,
            CHECKSUM_XXH3,
            runner.checksums,  # type: ignore[arg-type]
            compute_range_checksums=runner.range_checksums,
        )
        codec = TableCodec(runner.shared.view, 0, runner.block_size_bytes, environment.encoded)
        self.engine_handle = SimEngineHandle(
            environment.network.loop,
            self.engine,
            clock,
            lambda result: self.worker.on_step(result),
            environment.chance,
        )
        context = WorkerContext(
            id=WorkerId(plan.name),
            generation=Incarnation(self.generation),
            host=plan.host,
            model_digest=plan.model_digest,
            config=WORKER,
            engine=self.engine_handle,
            engine_config=environment.engine_config,
            key_hasher=self.engine.key_hasher,
            layout=layout,
            transports=transports,
            clock=environment.clock,
            telemetry=telemetry_for(environment.clock),
            codecs={codec.name: codec} if self._has_codecs else {},
            staging=self.staging,
        )
        self._variant = context.variant
        self.store = self._build_store(context)
        self.kv_importer = KvImporter(context, SimPeers(self.process), IMPORT_TIMEOUTS)
        self.prefill = PrefillHandler(context, self.store)
        if environment.encodes_transfers:
            _encode_exports(self.prefill.exports)
        self.worker = Worker(
            context,
            self.prefill,
            DecodeHandler(context, self.kv_importer),
            RoleState(plan.role, self._send_heartbeat_now),
            ConstraintOpener(),
            self._has_other_workers,
        )

    def _build_store(self, context: WorkerContext) -> PrefixStore:
        environment = self._environment
        if not environment.has_stores:
            return NoStore()
        reader = BlockReader(
            context.layout, context.staging, context.codecs, environment.clock, STORE_SECONDS
        )
        client = ClusterStoreClient(
            self._membership, environment.index, context.transports,
            store_client_factory(self.process), context.host, environment.clock, STORE_SECONDS,
            RAW_ONLY.union(reader.accepted(exact=False)),
        )  # fmt: skip
        encoder = StoreEncoder(
            BlockEncoder(context.layout, context.staging, context.codecs),
            KvCodecName.LOSSLESS if environment.encodes_stored else KvCodecName.NONE,
        )
        publisher = StorePublisher(
            context.engine, client, context.layout, self.plan.model_digest, encoder
        )
        return ClusterPrefixStore(
            context.engine, client, publisher, context.layout,
            environment.engine_config,
            environment.clock, STORE_SECONDS, self.plan.prefer, reader,
        )  # fmt: skip

    # -- role changes and draining ---------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        alive = self.process.alive and not self.process.frozen
        return alive and self.worker.state is WorkerState.READY

    def _has_other_workers(self) -> bool:
        """Return whether the registry lists another worker of the variant, of any role, that is
        ready, so that requests could move to it."""
        members, variant_id = self._membership.current, self._variant.id
        ready = [each for role in WORKER_KINDS for each in members.ready(role, variant_id)]
        return any(member.id != self.plan.name for member in ready)

    def convert(self) -> None:
        """Move the worker to the next pool, where its next incarnations will start, too."""
        roles = [*WORKER_KINDS]
        role = roles[(roles.index(self.plan.role) + 1) % len(roles)]
        self.plan = replace(self.plan, role=role)
        self._follow_members()
        self.worker.convert(role)

    def _follow_members(self) -> None:
        """Start to follow the registry's members, unless the worker already follows them because
        the cluster has stores."""
        if not (self._environment.has_stores or self._follows_members):
            self._follows_members = True
            self.process.start_task(self._membership.run())

    def _send_heartbeat_now(self) -> None:
        self._heartbeat.announce_now()

    async def drain(self) -> None:
        """Start to drain and announce this to the registry at once. Return when the last request
        has ended."""
        self._follow_members()
        self.worker.start_drain()
        self._heartbeat.announce_now()
        while not self.worker.is_idle:
            await self._environment.clock.sleep(0.05)

    async def leave(self) -> None:
        await self.drain()
        await self._registry.withdraw(WorkerId(self.plan.name), Incarnation(self.generation))
        await self.framed_server.close()

    # -- accounting ------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check the invariants that must hold at any moment."""
        self.engine.check_integrity()
        if self.staging is not None:
            self.staging.check_integrity()
        assert len(self.worker._jobs) <= WORKER.max_jobs, (
            f"{self.plan.name} accepted more than max_jobs jobs"
        )
        jobs = [job.request_id for job in self.worker._jobs]
        assert len(jobs) == len(set(jobs)), f"{self.plan.name} has two placements of a request"

    @property
    def is_at_rest(self) -> bool:
        counts = self.engine.stats().pool
        is_pinned = counts.referenced or counts.filling or counts.quarantined
        has_jobs = (
            self.worker._jobs._latest or self.prefill.exports or self.kv_importer._reservation_queue
        )
        is_staging = self.staging is not None and self.staging.used_bytes
        return self.worker.is_idle and not (
            is_pinned or has_jobs or is_staging or self.engine.has_work()
        )

    def describe(self) -> str:
        placements = [job.spec.request_id for job in self.worker._jobs]
        staging = "" if self.staging is None else f" {self.staging.describe()}"
        return f"{self.plan.name}: {self.engine.stats()} {placements}{staging}"

    def _reserved_for(self, span: TransferRange) -> object:
        """Check that KV which is read from elsewhere goes only into blocks that are reserved, or
        into an allocated range of the staging area. Return that range."""
        if span.local_offset >= self._staging_offset:
            assert self.staging is not None
            ranges = [
                each
                for each in self.staging._allocated.values()
                if each.offset_bytes <= span.local_offset
                and span.local_offset + span.size_bytes <= each.end_bytes
            ]
            assert ranges, f"{self.plan.name}: a read writes to {span}, which is not allocated"
            return ranges[0]
        size = BLOCK_TOKENS * 8
        first, end = span.local_offset // size, (span.local_offset + span.size_bytes) // size
        for block_id in range(first, end):
            state = self.engine._pool.state(BlockId(block_id))
            may = state in (BlockState.FILLING, BlockState.QUARANTINED)
            assert may, f"{self.plan.name}: a read writes to block {block_id}, which is {state}"
        return None

    def _member(self) -> Member:
        return Member(
            id=WorkerId(self.plan.name),
            role=self.worker.role,
            address=self.address,
            generation=Incarnation(self.generation),
            state=self.worker.state,
            host=self.plan.host,
            model="toy",
            model_digest=self._variant.model_digest,
            block_tokens=self._variant.block_tokens,
            kv_dtype=self._variant.kv_dtype,
            kv_layout=self._variant.kv_layout,
            kv_bytes_per_token=8,
            device="toy",
            max_model_tokens=MAX_MODEL_TOKENS,
            transports=(NAME,),
            framed_address=self.framed_address,
            adapters=tuple(WorkerAdapter(each.name, each.digest) for each in ADAPTERS),
            load=self.worker.load,
        )


def telemetry_for(clock: SimClock) -> WorkerTelemetry:
    """Return the same telemetry object for all workers and runs, since creating one takes
    milliseconds. Tests that read telemetry replace this function."""
    return _shared_telemetry()


@lru_cache
def _shared_telemetry() -> WorkerTelemetry:
    return WorkerTelemetry("all", CollectorRegistry(), SystemClock())
