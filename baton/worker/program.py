"""The program of both kinds of worker: loads the model, opens the sockets, joins, serves."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc.aio
import structlog
from prometheus_client import CollectorRegistry

from baton.checkpoint import load_model_config, resolve_model
from baton.clock import Clock, SystemClock
from baton.config import Settings
from baton.core.ids import Incarnation, TokenId, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.engine.checksum import block_checksums, checksum_algorithm
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.executor import ThreadedExecutor
from baton.engine.runner import ModelRunner
from baton.errors import Invalid
from baton.kv.cluster_store_client import ClusterStoreClient
from baton.kv.redis_index import RedisKvIndex
from baton.network.address import host_port
from baton.obs.tracing import ClosableSpanSink, close_span_sink, open_span_sink
from baton.pools.base import WORKER_ROLES
from baton.registry.heartbeat import Heartbeat
from baton.registry.membership import Membership
from baton.registry.redis import RedisRegistry
from baton.registry.startup import wait_for_registry
from baton.rpc.framed.server import FramedServer
from baton.rpc.framed.worker_service import framed_worker_services
from baton.rpc.kvstore_client import KvStoreClient
from baton.rpc.server import build_server, listen
from baton.rpc.worker_client import GrpcKvImportConnector
from baton.rpc.worker_service import add_worker_service
from baton.serve.status_pipe import STATUS, report_progress, report_role
from baton.text.grammar.checker import GrammarChecker
from baton.text.grammar.matcher import GrammarCompiler
from baton.transport.base import Region, Transport
from baton.transport.selection import host_id, open_transports
from baton.transport.stale_peers import StalePeerSweeper
from baton.worker.cluster_prefix_store import ClusterPrefixStore
from baton.worker.engine_thread import EngineThread
from baton.worker.kv_import import KvImporter, KvImportTimeouts
from baton.worker.kv_layout import KvLayout
from baton.worker.numerics_check import check_same_numerics
from baton.worker.reload_policy import ReloadMode
from baton.worker.store_publisher import StorePublisher
from baton.worker.telemetry import WorkerTelemetry
from baton.worker.worker import Worker, WorkerConfig

log = structlog.get_logger(__name__)

ENGINE_PROBE_SECONDS = 5.0
"""Between two questions to the engine's thread whether it still answers."""

RESERVE_AHEAD_STEPS = 2
"""Of a prompt are left when the decode worker is asked to make room: one would do if the other
worker and the link never kept it waiting."""


class WorkerProgram:
    """One worker process, as ``baton.serve.process`` runs it."""

    def __init__(self, settings: Settings, role: Role, clock: Clock | None = None) -> None:
        self._settings = settings
        self._role = role
        self._clock = clock or SystemClock()
        self.metrics = CollectorRegistry()
        self._generation = Incarnation(self._clock.wall_nanoseconds())
        self._id = WorkerId(settings.id or f"{role.value}-{os.getpid()}")
        url = settings.needs_redis_url
        self._registry = RedisRegistry(url, settings.cluster, settings.cluster_secret, self._clock)
        self._membership = Membership(self._registry, self._clock)
        self._index = RedisKvIndex(url, settings.cluster)
        self._peers = GrpcKvImportConnector(settings.trust)
        self._server: grpc.aio.Server | None = None
        self._spans: ClosableSpanSink | None = None
        self._lines: FramedServer | None = None
        self._checker: GrammarChecker | None = None
        self._crashed: asyncio.Future[None] | None = None
        self._address, self._line = "", ""

    # -- Program ------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when the worker can serve. Raises Invalid, Unavailable."""
        self._crashed = asyncio.get_running_loop().create_future()
        await wait_for_registry(self._registry, self._clock, self._settings.redis_wait_seconds)
        self._runner = await asyncio.to_thread(self._load)
        check_same_numerics(await self._registry.members(), self._id, self._runner.arithmetic)
        self._engine = Engine(
            self._runner,
            self._engine_config(),
            model_digest=self._runner.model_digest,
            kv_dtype=self._runner.kv_dtype,
            eos_token_ids=frozenset(TokenId(t) for t in self._runner.model_config.eos_token_ids),
            clock=self._clock,
            pipeline=ThreadedExecutor(self._runner) if self._overlaps() else None,
        )
        self._transports = self._open_transports()
        self._departures = StalePeerSweeper(
            self._transports.values(), self._membership, self._clock
        )
        self._worker = self._build_worker()
        self._heartbeat = Heartbeat(
            self._registry, self._member, self._clock, self._settings.heartbeat_seconds
        )
        self._server = await self._listen()

    async def run(self) -> None:
        """Serves until cancelled; ends with the engine's crash if that comes first."""
        assert self._crashed is not None
        self._thread.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker.run())
            tasks.create_task(self._store.run())
            tasks.create_task(self._membership.run())
            tasks.create_task(self._departures.run())
            tasks.create_task(self._heartbeat.run())
            tasks.create_task(self._ask_engine())
            await self._crashed

    async def drain(self) -> None:
        """Takes nothing new, and returns when nothing is left, neither to do nor to hand over."""
        self._worker.start_drain()
        self._heartbeat.hurry()
        while not self._worker.drained:
            await self._clock.sleep(0.05)

    async def stop(self) -> None:
        if self._checker is not None:
            self._checker.close()
        if self._lines is not None:
            await self._lines.close()
        if self._server is not None:
            await self._server.stop(grace=1.0)
            await self._thread.stop()
            for transport in self._transports.values():
                await asyncio.to_thread(transport.close)
            await self._client.close()
        await close_span_sink(self._spans)
        await self._peers.close()
        await self._index.close()
        await self._registry.close()

    @property
    def address(self) -> str:
        return self._address

    async def _ask_engine(self) -> None:
        """A device that hangs raises nothing: the engine's thread waits for it, for ever."""
        while True:
            with STATUS.vitals.waiting("the engine"):
                await self._thread.call(lambda engine: None)
            await self._clock.sleep(ENGINE_PROBE_SECONDS)

    # -- parts ----------------------------------------------------------------------------

    def _load(self) -> ModelRunner:
        """The vocabulary is read while the weights are: it takes a second if it is large."""
        with ThreadPoolExecutor(1) as pool:
            grammars = pool.submit(self._load_grammars)
            runner = self._load_runner()
            self._grammars = grammars.result()
        if self._grammars is not None:
            self._checker = self._start_checker()
        return runner

    def _start_checker(self) -> GrammarChecker:
        """Grammars are tried in helper processes before they are followed in this one."""
        path = resolve_model(self._settings.model)
        model = load_model_config(path)
        checker = GrammarChecker.of_model(path, model.vocab_size, model.eos_token_ids)
        checker.start()
        return checker

    def _load_runner(self) -> ModelRunner:
        settings = self._settings
        runner = ModelRunner.load(
            resolve_model(settings.model),
            device=settings.device,
            dtype=settings.dtype,
            num_blocks=settings.num_blocks,
            pool_bytes=settings.pool_bytes,
            block_tokens=settings.block_tokens,
            cpu_kernels=settings.cpu_kernels,
            quantization=settings.quantization,
            kv_dtype=settings.kv_dtype,
            deterministic=settings.deterministic,
            cuda_graphs=settings.cuda_graphs,
            progress=partial(report_progress, "weights"),
        )
        runner.warm(settings.max_running)
        tell = log.warning if runner.choice.is_fallback else log.info
        tell("model_loaded", computed_by=runner.choice.told, quantization=runner.quantization)
        return runner

    def _overlaps(self) -> bool:
        """Whether the model has a thread of its own, where the next step waits for this one."""
        if self._settings.overlap == "auto":
            return self._runner.leaves_free(os.cpu_count() or 1)
        return self._settings.overlap == "on"

    def _load_grammars(self) -> GrammarCompiler | None:
        """None where they can't be followed: requests that have one are refused then."""
        path = resolve_model(self._settings.model)
        model = load_model_config(path)
        tokens = [TokenId(token) for token in model.eos_token_ids]
        try:
            return GrammarCompiler.load(path, model.vocab_size, tokens)
        except Invalid as error:
            log.warning("grammars_unavailable", error=str(error))
            return None

    def _engine_config(self) -> EngineConfig:
        settings = self._settings
        model = load_model_config(resolve_model(settings.model))
        limit = model.max_position_embeddings
        return EngineConfig(
            block_tokens=settings.block_tokens,
            max_step_tokens=settings.max_step_tokens,
            chunk_tokens=settings.chunk_tokens or settings.max_step_tokens,
            token_gap_seconds=settings.slo_token_gap_seconds,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            order=settings.prefill_order,
            fairness=settings.tenant_fairness,
            max_model_tokens=min(settings.max_model_tokens or limit, limit),
            vocab_size=model.vocab_size,
        )

    def _open_transports(self) -> dict[str, Transport]:
        pool = self._runner.pool
        region = Region(pool.address, pool.size_bytes, pool.device, pool.file_descriptor)
        return open_transports(
            self._settings.transports,
            owner=self._id,
            generation=self._generation,
            region=region,
            listen_host=self._settings.grpc_host,
            advertise_host=self._settings.advertise_address,
            trust=self._settings.trust,
            nixl_interfaces=self._settings.nixl_interfaces,
            clock=self._clock,
        )

    def _build_worker(self) -> Worker:
        runner, host = self._runner, host_id()
        self._witness = self._build_witness()
        layout = KvLayout(
            name=runner.kv_layout,
            block_bytes=runner.pool.block_bytes,
            checksum_algorithm=checksum_algorithm(runner.pool),
            checksums=partial(block_checksums, runner.pool),
        )
        digest = runner.model_digest.hex()
        self._thread = EngineThread(self._engine, self._on_step, self._on_crash)
        intake = KvImporter(
            self._thread,
            self._peers,
            self._transports,
            layout,
            digest,
            host,
            self._clock,
            KvImportTimeouts(),
        )
        self._store = self._build_store(layout, host)
        return Worker(
            self._id,
            self._generation,
            WorkerConfig(late_tokens=RESERVE_AHEAD_STEPS * self._settings.max_step_tokens),
            self._thread,
            intake,
            self._store,
            layout,
            self._transports,
            self._engine.keys,
            digest,
            host,
            self._clock,
            self._has_heirs,
            self._role,
            self._on_change,
            self._grammars,
            self._witness,
            self._checker.check if self._checker is not None else None,
        )

    def _build_witness(self) -> WorkerTelemetry:
        settings = self._settings
        self._spans = open_span_sink(
            settings.trace_endpoint,
            self._clock,
            self.metrics,
            role=self._role.value,
            process=self._id,
            cluster=settings.cluster,
        )
        witness = WorkerTelemetry(self._id, self.metrics, self._clock, self._spans)
        witness.gauges.block_bytes = self._runner.pool.block_bytes
        witness.gauges.labels = self._labels(self._role)
        return witness

    def _labels(self, role: Role) -> dict[str, str]:
        runner = self._runner
        return {
            "role": role.value,
            "model": self._settings.model_name,
            "device": str(runner.pool.device),
            "kv_dtype": runner.kv_dtype,
            "quantization": runner.quantization,
            "transports": ",".join(self._transports),
        }

    def _has_heirs(self) -> bool:
        """Whether another worker could go on with what this one has."""
        ready = [m for role in WORKER_ROLES for m in self._membership.ready(role)]
        return any(member.id != self._id for member in ready)

    def _build_store(self, layout: KvLayout, host: str) -> ClusterPrefixStore:
        settings, runner = self._settings, self._runner
        client = self._client = ClusterStoreClient(
            self._membership,
            self._index,
            self._transports,
            self._store_link,
            host,
            self._clock,
            settings.store_seconds,
        )
        return ClusterPrefixStore(
            self._thread,
            client,
            StorePublisher(self._thread, client, layout, runner.model_digest[:16]),
            layout,
            runner.block_tokens,
            self._engine_config().chunk_limit,
            self._clock,
            settings.store_seconds,
            None if settings.store_reload == "auto" else ReloadMode(settings.store_reload),
        )

    def _store_link(self, node: Member) -> KvStoreClient:
        settings = self._settings
        door = node.door if node.host == host_id() else ""
        return KvStoreClient(node.address, settings.trust, door, settings.store_seconds)

    def _on_change(self) -> None:
        """Its state, or its role."""
        self._heartbeat.hurry()
        self._witness.gauges.labels = self._labels(self._worker.role)
        if self._worker.state is not WorkerState.DRAINING:
            report_role(self._worker.role.value, self._address)

    def _on_step(self, result: object) -> None:
        self._worker.on_step(result)  # type: ignore[arg-type]

    def _on_crash(self, error: BaseException) -> None:
        assert self._crashed is not None
        log.error("engine_crashed", error=repr(error))
        if not self._crashed.done():
            self._crashed.set_exception(error)

    async def _listen(self) -> grpc.aio.Server:
        settings = self._settings
        server = build_server(settings.trust)
        add_worker_service(server, self._worker)
        port = await listen(
            server,
            settings.grpc_host,
            settings.grpc_port,
            settings.trust,
            settings.advertise_address,
        )
        host = settings.advertise_address or settings.grpc_host
        self._address = host_port(host, port)
        self._lines = FramedServer(settings.trust, framed_worker_services(self._worker))
        line_port = await self._lines.listen(settings.grpc_host, settings.line_port)
        self._line = host_port(host, line_port)
        return server

    def _member(self) -> Member:
        runner = self._runner
        return Member(
            id=self._id,
            role=self._worker.role,
            address=self._address,
            generation=self._generation,
            state=self._worker.state if self._server else WorkerState.GONE,
            host=host_id(),
            pid=os.getpid(),
            model=self._settings.model,
            model_digest=runner.model_digest.hex(),
            block_tokens=runner.block_tokens,
            kv_dtype=runner.kv_dtype,
            kv_bytes_per_token=runner.pool.block_bytes // runner.block_tokens,
            device=runner.pool.device,
            max_model_tokens=self._engine_config().max_model_tokens,
            transports=tuple(self._transports),
            line=self._line,
            arithmetic=runner.arithmetic,
            load=self._worker.load,
        )
