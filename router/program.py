"""The router as a program: joins the cluster, listens, serves, drains."""

import asyncio
import gc
import os
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from baton.checkpoint import ModelConfig, load_model_config, resolve_model
from baton.clock import Clock, SystemClock
from baton.config import Settings, baton_home
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.worker_load import WorkerLoad
from baton.obs.tracing import ClosableSpanSink, close_span_sink, open_span_sink
from baton.registry.heartbeat import Heartbeat
from baton.registry.redis import RedisRegistry
from baton.registry.startup import wait_for_registry
from baton.serve.lifecycle import Program
from baton.system.heap import keep_little_free_memory
from baton.text.grammar.checker import GrammarChecker
from baton.text.tokenizer import Tokenizer
from router.app import build_app
from router.batches.batch_store import BatchStore
from router.batches.file_limits import FileLimits
from router.batches.service import BatchService
from router.generation.attempt import TokenTimeouts
from router.generation.cluster import Cluster
from router.generation.conductor_placer import ConductorPlacer
from router.generation.generation import FailoverConfig, GenerationContext
from router.generation.placement import FallbackPlacer
from router.generation.prefix_pinner import GrpcPinClient, PrefixPinner
from router.generation.ring_placer import RingPlacer
from router.generation.worker_connection_pool import WorkerConnectionPool
from router.http.listeners import HttpListeners
from router.http.peer_routers import PeerRouters
from router.openai.context import RouterConfig, RouterContext
from router.openai.grammar_validator import GrammarValidator
from router.telemetry.metrics import RouterMetrics
from router.telemetry.slo import SloTargets
from router.telemetry.tracing import RequestTracer
from router.tenants.authentication import Authenticator
from router.tenants.redis_quota_store import RedisQuotaStore
from router.tenants.redis_usage_store import RedisUsageStore
from router.tenants.tenants_file_watcher import TenantsFileWatcher
from router.tenants.usage_flusher import UsageFlusher

log = structlog.get_logger(__name__)

DRAIN_POLL_SECONDS = 0.05
WORKER_POLL_SECONDS = 0.2
GC_THRESHOLDS = (100_000, 20, 50)
"""Objects until the youngest are looked through; times until the older are, and until all are."""


class RouterProgram:
    """One router process, as ``baton.serve.process`` runs it."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._generation = Incarnation(self._clock.wall_nanoseconds())
        self._id = WorkerId(settings.id or f"router-{os.getpid()}")
        self._registry = RedisRegistry(
            settings.needs_redis_url, settings.cluster, settings.cluster_secret, self._clock
        )
        self._links = WorkerConnectionPool(settings.trust)
        slo = SloTargets(settings.slo_first_token_seconds, settings.slo_token_gap_seconds)
        self._metrics = RouterMetrics(slo)
        self._usage = RedisUsageStore(settings.needs_redis_url, settings.cluster)
        self._treasury = RedisQuotaStore(settings.needs_redis_url, settings.cluster)
        self._spans: ClosableSpanSink | None = None
        self._tenancy: UsageFlusher | None = None
        self._conductors: ConductorPlacer | None = None
        self._ports: HttpListeners | None = None
        self._checker: GrammarChecker | None = None
        self._state = WorkerState.JOINING

    # -- Program ------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when connections are taken. Raises Invalid, Unavailable."""
        settings = self._settings
        await wait_for_registry(self._registry, self._clock, settings.redis_wait_seconds)
        model_dir = await asyncio.to_thread(resolve_model, settings.model)
        model = load_model_config(model_dir)
        tokenizer = await asyncio.to_thread(Tokenizer.load, model_dir, self._clock)
        self._cluster = self._build_cluster(model)
        await self._cluster.refresh()
        await self._await_worker()
        stores = GrpcPinClient(settings.trust)
        self._pinner = PrefixPinner(self._cluster, stores, self._clock)
        eos = model.eos_token_ids
        self._checker = GrammarChecker.of_model(model_dir, model.vocab_size, eos)
        self._checker.start()
        self._service = self._build_service(tokenizer, model, GrammarValidator(self._checker.check))
        self._tenancy = self._service.tenancy = self._build_tenancy()
        self._desk = self._build_desk()
        self._ports = self._build_ports()
        self._ports.open()
        self._heartbeat = Heartbeat(
            self._registry, self._member, self._clock, settings.heartbeat_seconds
        )

    async def run(self) -> None:
        """Serves until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._links.run())
            tasks.create_task(self._cluster.run())
            assert self._conductors is not None, "start() comes first"
            tasks.create_task(self._conductors.run())
            assert self._tenancy is not None, "start() comes first"
            tasks.create_task(self._tenancy.run())
            tasks.create_task(self._service.entrance.run())
            tasks.create_task(self._pinner.run())
            assert self._ports is not None, "start() comes first"
            tasks.create_task(self._ports.run(self._note_listening))
            tasks.create_task(self._heartbeat.run())
            tasks.create_task(self._desk.run())

    async def drain(self) -> None:
        """Returns when no request is left. New ones go to the others at the port, or behind the
        load balancer, once that has heard of it; they are refused where there is neither."""
        self._service.draining = True
        self._state = WorkerState.DRAINING
        self._heartbeat.hurry()
        await self._clock.sleep(self._settings.endpoint_grace_seconds)
        if _is_behind_load_balancer(self._settings) and self._ports is not None:
            await self._ports.leave()
        while self._service.gate.inside:
            await self._clock.sleep(DRAIN_POLL_SECONDS)

    async def stop(self) -> None:
        if self._ports is not None:
            await self._ports.close()
        if self._conductors is not None:
            await self._conductors.close()
        if self._checker is not None:
            self._checker.close()
        if self._tenancy is not None:
            await self._tenancy.stop()
        await close_span_sink(self._spans)
        await self._usage.close()
        await self._treasury.close()
        await self._registry.close()

    @property
    def address(self) -> str:
        """host:port that reach this router, from ``start`` on."""
        return self._ports.address if self._ports is not None else ""

    @property
    def metrics(self) -> CollectorRegistry:
        return self._metrics.registry

    async def _await_worker(self) -> None:
        """Returns once somebody can answer, or when that takes too long: then it says so itself."""
        until = self._clock.monotonic() + self._settings.worker_wait_seconds
        while not self._cluster.is_ready and self._clock.monotonic() < until:
            await self._clock.sleep(WORKER_POLL_SECONDS)
            await self._cluster.refresh()

    # -- parts ----------------------------------------------------------------------------

    def _build_cluster(self, model: ModelConfig) -> Cluster:
        limit = model.max_position_embeddings
        return Cluster(
            self._registry, self._clock, min(self._settings.max_model_tokens or limit, limit)
        )

    def _build_service(
        self, tokenizer: Tokenizer, model: ModelConfig, formats: GrammarValidator
    ) -> RouterContext:
        settings = self._settings
        self._conductors = ConductorPlacer(self._cluster, self._clock, settings.trust)
        placer = FallbackPlacer([self._conductors, RingPlacer(self._cluster)])
        config = RouterConfig(
            model=settings.model_name,
            vocab_size=model.vocab_size,
            aliases=frozenset({settings.model}),
            max_body_bytes=settings.max_body_bytes,
            max_inflight_body_bytes=settings.max_inflight_body_bytes,
            max_concurrent_requests=settings.max_concurrent_requests,
            tenant_secret=settings.tenant_secret,
            slo_first_token_seconds=settings.slo_first_token_seconds,
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
            control_socket=settings.control_socket,
            body_seconds=settings.body_seconds,
            request_seconds=settings.request_seconds,
            cors_origins=settings.cors_origins,
            known_hosts=settings.known_hosts(settings.host),
            access_log=settings.access_log,
            refuses_special_tokens=settings.special_tokens_in_messages == "refused",
        )
        return RouterContext(
            config=config,
            tokenizer=tokenizer,
            cluster=self._cluster,
            guide=GenerationContext(
                placer,
                self._links,
                self._clock,
                _failover_config(settings),
                vocab_size=model.vocab_size,
            ),
            doorkeeper=Authenticator(settings.api_keys, settings.admin_key),
            clock=self._clock,
            metrics=self._metrics,
            usage=self._usage,
            treasury=self._treasury,
            pinner=self._pinner,
            tracing=self._open_tracing(),
            formats=formats,
            peers=PeerRouters(
                self._id,
                lambda: self.address,
                self._cluster,
                settings.tls_certificate,
                settings.admin_key,
            ),
            refuses_when_draining=not _is_behind_load_balancer(settings),
        )

    def _open_tracing(self) -> RequestTracer | None:
        settings = self._settings
        self._spans = open_span_sink(
            settings.trace_endpoint,
            self._clock,
            self._metrics.registry,
            role=Role.ROUTER.value,
            process=self._id,
            cluster=settings.cluster,
        )
        return (
            RequestTracer(self._spans, settings.trace_sample, self._clock) if self._spans else None
        )

    def _build_tenancy(self) -> UsageFlusher:
        """Reads the tenants file. Raises Invalid."""
        service, path = self._service, self._settings.tenants_file
        file = None
        if path is not None:
            metrics = service.metrics.tenants
            file = TenantsFileWatcher(Path(path), service.doorkeeper.admit, metrics, self._clock)
            file.read()
        writer = f"{self._id}/{self._generation}"
        return UsageFlusher(file, service.ledger, self._usage, writer, self._clock)

    def _build_desk(self) -> BatchService:
        settings = self._settings
        folder = settings.batch_folder
        return BatchService(
            self._service,
            BatchStore(Path(folder) if folder else baton_home() / "batches" / settings.cluster),
            lines_per_worker=settings.batch_lines,
            max_file_bytes=settings.max_file_bytes,
            folder_bytes=settings.batch_folder_bytes,
            file_limits=FileLimits(
                settings.tenant_files,
                settings.tenant_file_bytes,
                settings.tenant_uploads_per_minute,
                settings.tenant_concurrent_uploads,
            ),
        )

    def _build_ports(self) -> HttpListeners:
        metrics, app = self._service.metrics, build_app(self._service, self._desk)
        ports = HttpListeners(self._settings, app, self._clock, metrics.note_refusal)
        metrics.connections.set_function(lambda: ports.num_connections)
        return ports

    def _note_listening(self) -> None:
        keep_little_free_memory()
        tune_garbage_collector()
        self._state = WorkerState.READY
        self._heartbeat.hurry()

    def _member(self) -> Member:
        return Member(
            id=self._id,
            role=Role.ROUTER,
            address=self.address,
            generation=self._generation,
            state=self._state,
            pid=os.getpid(),
            model=self._settings.model,
            load=WorkerLoad(running=self._service.gate.inside),
        )


def tune_garbage_collector() -> None:
    """What a router has once it has started stays, and is not looked through for garbage again.
    Requests go by their reference counts; looking through thousands of idle streams holds up all
    others for a tenth of a second, and is done seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def build(settings: Settings) -> Program:
    return RouterProgram(settings)


def _is_behind_load_balancer(settings: Settings) -> bool:
    """To whom clients come that can't come to this router any more."""
    return settings.reuse_port or settings.endpoint_grace_seconds > 0


def _failover_config(settings: Settings) -> FailoverConfig:
    deadlines = TokenTimeouts(
        first_token=settings.first_token_seconds,
        handoff=settings.first_token_seconds,
        token_gap=settings.next_token_seconds,
    )
    return FailoverConfig(placement_seconds=settings.place_seconds, deadlines=deadlines)
