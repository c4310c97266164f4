"""The program of prefill and decode workers: load the model, listen, register, serve."""

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
from baton.system.heap import trim_heap
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

GRAMMAR_IDLE_SECONDS = 30.0
"""After this time without a request, a compiled grammar (about 1 MB) is dropped. Compiling it again
takes milliseconds."""

ENGINE_PROBE_SECONDS = 5.0
"""Interval between checks that the engine's thread still responds."""

RESERVE_AHEAD_STEPS = 2
"""The decode worker is told to reserve blocks when this many steps of a prompt are left to compute.
One would be enough if the decode worker and the link never caused a delay."""


class WorkerProgram:
    """One worker process, as ``baton.serve.process`` runs it."""

    def __init__(self, settings: Settings, role: Role, clock: Clock | None = None) -> None:
        self._settings = settings
        self._role = role
        self._clock = clock or SystemClock()
        self.metrics = CollectorRegistry()
        self._generation = Incarnation(self._clock.wall_nanoseconds())
        self._id = WorkerId(settings.id or f"{role.value}-{os.getpid()}")
        url = settings.required_redis_url
        self._registry = RedisRegistry(url, settings.cluster, settings.cluster_secret, self._clock)
        self._membership = Membership(self._registry, self._clock)
        self._index = RedisKvIndex(url, settings.cluster)
        self._peers = GrpcKvImportConnector(settings.trust)
        self._server: grpc.aio.Server | None = None
        self._spans: ClosableSpanSink | None = None
        self._framed_server: FramedServer | None = None
        self._grammar_checker: GrammarChecker | None = None
        self._crashed: asyncio.Future[None] | None = None
        self._address, self._framed_address = "", ""

    # -- Program ------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the worker; return when it can serve. Raises Invalid, Unavailable."""
        self._crashed = asyncio.get_running_loop().create_future()
        await wait_for_registry(self._registry, self._clock, self._settings.redis_wait_seconds)
        self._runner = await asyncio.to_thread(self._load_model)
        check_same_numerics(
            await self._registry.members(), self._id, self._runner.numerics_fingerprint
        )
        self._engine = Engine(
            self._runner,
            self._engine_config(),
            model_digest=self._runner.model_digest,
            kv_dtype=self._runner.kv_dtype,
            eos_token_ids=frozenset(TokenId(t) for t in self._runner.model_config.eos_token_ids),
            clock=self._clock,
            executor=ThreadedExecutor(self._runner) if self._uses_async_scheduling() else None,
        )
        self._transports = self._open_transports()
        self._stale_peer_sweeper = StalePeerSweeper(
            self._transports.values(), self._membership, self._clock
        )
        self._worker = self._build_worker()
        self._heartbeat = Heartbeat(
            self._registry, self._member, self._clock, self._settings.heartbeat_interval_seconds
        )
        self._server = await self._listen()

    async def run(self) -> None:
        """Serve until cancelled. If the engine crashes, raise its exception."""
        assert self._crashed is not None
        self._thread.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker.run())
            tasks.create_task(self._store.run())
            tasks.create_task(self._membership.run())
            tasks.create_task(self._stale_peer_sweeper.run())
            tasks.create_task(self._heartbeat.run())
            tasks.create_task(self._probe_engine())
            tasks.create_task(self._drop_unused_grammars())
            await self._crashed

    async def drain(self) -> None:
        """Stop accepting requests; return when no requests are left and the computed blocks are
        published."""
        self._worker.start_drain()
        self._heartbeat.announce_now()
        while not self._worker.is_drained:
            await self._clock.sleep(0.05)

    async def stop(self) -> None:
        if self._grammar_checker is not None:
            self._grammar_checker.close()
        if self._framed_server is not None:
            await self._framed_server.close()
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

    async def _probe_engine(self) -> None:
        """Check regularly that the engine's thread responds: a hanging device raises no error, but
        blocks the thread forever."""
        while True:
            with STATUS.health.waiting_for("the engine"):
                await self._thread.call(lambda engine: None)
            await self._clock.sleep(ENGINE_PROBE_SECONDS)

    async def _drop_unused_grammars(self) -> None:
        """Drop compiled grammars once they are idle, and return their memory to the system."""
        while self._grammars is not None:
            await self._clock.sleep(GRAMMAR_IDLE_SECONDS / 2)
            if self._grammars.drop_unused(GRAMMAR_IDLE_SECONDS):
                await asyncio.to_thread(trim_heap)

    # -- parts ----------------------------------------------------------------------------

    def _load_model(self) -> ModelRunner:
        """Load the weights and, concurrently, the vocabulary for grammars, which takes a second if
        it is large."""
        with ThreadPoolExecutor(1) as pool:
            grammars = pool.submit(self._load_grammars)
            runner = self._load_runner()
            self._grammars = grammars.result()
        if self._grammars is not None:
            self._grammar_checker = self._start_checker()
        return runner

    def _start_checker(self) -> GrammarChecker:
        """Start the helper processes that try to compile a grammar before this process does."""
        path = resolve_model(self._settings.model)
        model = load_model_config(path)
        checker = GrammarChecker.for_model(path, model.vocab_size, model.eos_token_ids)
        checker.start_helper()
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
        runner.warm_up(settings.max_sequences)
        log_level = log.warning if runner.backend.is_fallback else log.info
        log_level(
            "model_loaded", computed_by=runner.backend.description, quantization=runner.quantization
        )
        return runner

    def _uses_async_scheduling(self) -> bool:
        """Whether to use async scheduling: the model runs in its own thread while the engine
        schedules the next step."""
        if self._settings.async_scheduling == "auto":
            return self._runner.leaves_core_free(os.cpu_count() or 1)
        return self._settings.async_scheduling == "on"

    def _load_grammars(self) -> GrammarCompiler | None:
        """Load the grammar compiler; None if the tokenizer does not support grammars, in which case
        requests with a grammar are rejected."""
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
            max_batched_tokens=settings.max_batched_tokens,
            chunk_tokens=settings.chunk_tokens or settings.max_batched_tokens,
            target_inter_token_latency_seconds=settings.slo_itl_seconds,
            max_sequences=settings.max_sequences,
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
        self._telemetry = self._build_telemetry()
        layout = KvLayout(
            name=runner.kv_layout,
            block_bytes=runner.pool.block_bytes,
            checksum_algorithm=checksum_algorithm(runner.pool),
            compute_checksums=partial(block_checksums, runner.pool),
        )
        digest = runner.model_digest.hex()
        self._thread = EngineThread(self._engine, self._on_step, self._on_crash)
        kv_importer = KvImporter(
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
            WorkerConfig(
                reserve_ahead_tokens=RESERVE_AHEAD_STEPS * self._settings.max_batched_tokens
            ),
            self._thread,
            kv_importer,
            self._store,
            layout,
            self._transports,
            self._engine.key_hasher,
            digest,
            host,
            self._clock,
            self._has_other_ready_workers,
            self._role,
            self._on_state_or_role_change,
            self._grammars,
            self._telemetry,
            self._grammar_checker.check if self._grammar_checker is not None else None,
        )

    def _build_telemetry(self) -> WorkerTelemetry:
        settings = self._settings
        self._spans = open_span_sink(
            settings.trace_endpoint,
            self._clock,
            self.metrics,
            role=self._role.value,
            process=self._id,
            cluster=settings.cluster,
        )
        telemetry = WorkerTelemetry(self._id, self.metrics, self._clock, self._spans)
        telemetry.gauges.block_bytes = self._runner.pool.block_bytes
        telemetry.gauges.labels = self._labels(self._role)
        return telemetry

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

    def _has_other_ready_workers(self) -> bool:
        """Whether another worker is ready, so that requests can be rerouted or migrated."""
        ready = [m for role in WORKER_ROLES for m in self._membership.ready(role)]
        return any(member.id != self._id for member in ready)

    def _build_store(self, layout: KvLayout, host: str) -> ClusterPrefixStore:
        settings, runner = self._settings, self._runner
        client = self._client = ClusterStoreClient(
            self._membership,
            self._index,
            self._transports,
            self._connect_store_node,
            host,
            self._clock,
            settings.store_timeout_seconds,
        )
        return ClusterPrefixStore(
            self._thread,
            client,
            StorePublisher(self._thread, client, layout, runner.model_digest[:16]),
            layout,
            runner.block_tokens,
            self._engine_config().max_chunk_tokens,
            self._clock,
            settings.store_timeout_seconds,
            None if settings.store_reload == "auto" else ReloadMode(settings.store_reload),
        )

    def _connect_store_node(self, node: Member) -> KvStoreClient:
        settings = self._settings
        socket_path = node.local_socket if node.host == host_id() else ""
        return KvStoreClient(
            node.address, settings.trust, socket_path, settings.store_timeout_seconds
        )

    def _on_state_or_role_change(self) -> None:
        """Announce a change of the worker's state or role."""
        self._heartbeat.announce_now()
        self._telemetry.gauges.labels = self._labels(self._worker.role)
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
        self._framed_server = FramedServer(settings.trust, framed_worker_services(self._worker))
        framed_port = await self._framed_server.listen(settings.grpc_host, settings.framed_port)
        self._framed_address = host_port(host, framed_port)
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
            framed_address=self._framed_address,
            numerics_fingerprint=runner.numerics_fingerprint,
            load=self._worker.load,
        )
