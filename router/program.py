"""The router process: it joins the cluster, listens, serves requests, and drains."""

import asyncio
import gc
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from baton.checkpoints.adapter_checkpoint import adapter_digest
from baton.checkpoints.checkpoint import load_model_config, load_model_limits
from baton.checkpoints.hub import resolve_model, without_revision
from baton.clock import Clock, SystemClock
from baton.config import Settings, baton_home
from baton.config.pinned_models import pin_models
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.worker_load import WorkerLoad
from baton.obs.metric_aliases import METRIC_ALIASES
from baton.obs.span import SpanSink
from baton.obs.tracing import SpanExport
from baton.registry.adapters import RedisAdapterRegistry
from baton.registry.heartbeat import Heartbeat
from baton.registry.redis import RedisRegistry
from baton.registry.startup import wait_for_registry
from baton.rpc.worker_client import ForwardClient
from baton.serve.lifecycle import Program
from baton.serve.status_pipe import STATUS
from baton.system.heap import limit_free_heap
from baton.text.grammar.checker import GrammarChecker
from baton.text.tokenizer import Tokenizer
from router.app import build_app
from router.batches.batch_store import BatchStore
from router.batches.file_limits import FileLimits
from router.batches.service import BatchService
from router.generation.adapter_directory import AdapterDirectory
from router.generation.attempt import TokenTimeouts
from router.generation.cluster import Cluster
from router.generation.conductor_placer import ConductorPlacer
from router.generation.generation_context import FailoverConfig, GenerationContext
from router.generation.placement import FallbackPlacer
from router.generation.prefix_pinner import GrpcPinClient, PrefixPinner
from router.generation.ring_placer import RingPlacer
from router.generation.worker_connection_pool import WorkerConnectionPool
from router.http.listeners import HttpListeners
from router.http.peer_routers import PeerRouters
from router.responses.background_responses import BackgroundResponses
from router.responses.redis_response_leases import RedisResponseLeases
from router.responses.redis_response_store import RedisResponseStore
from router.responses.response_service import ResponseService
from router.responses.response_store import ResponseLimits
from router.serving.context import RouterConfig, RouterContext
from router.serving.grammar_validator import GrammarValidator
from router.serving.redis_kept_answers import RedisKeptAnswers
from router.serving.resumption import Resumption
from router.serving.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from router.serving.served_model import ServedModel
from router.telemetry.metrics import RouterMetrics
from router.telemetry.router_telemetry import RouterTelemetry
from router.telemetry.slo import SloTargets
from router.telemetry.tracing import RequestTracer
from router.tenants.authentication import Authenticator
from router.tenants.redis_quota_store import RedisQuotaStore
from router.tenants.redis_usage_store import RedisUsageStore
from router.tenants.tenant_directory import TenantDirectory
from router.tenants.tenants_file_watcher import TenantsFileWatcher
from router.tenants.usage_flusher import UsageFlusher

log = structlog.get_logger(__name__)

DRAIN_POLL_SECONDS = 0.05
WORKER_POLL_SECONDS = 0.2
GC_THRESHOLDS = (100_000, 20, 50)
"""The arguments of ``gc.set_threshold``: the number of allocations before the youngest generation
is collected, and for the two older ones the number of collections of the next younger one."""


class RouterProgram:
    """The program of one router process. :func:`baton.serve.process.serve` calls its methods."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._incarnation = Incarnation(self._clock.wall_nanoseconds())
        self._id = WorkerId(settings.id or f"router-{os.getpid()}")
        self._registry = RedisRegistry(
            settings.required_redis_url, settings.cluster, settings.cluster_secret, self._clock
        )
        self._adapter_registry = RedisAdapterRegistry(
            settings.required_redis_url, settings.cluster, settings.cluster_secret, self._clock
        )
        self._worker_connections = WorkerConnectionPool(settings.trust)
        self._forward_client = ForwardClient(settings.trust)
        self._metrics = RouterMetrics(
            _slo_targets(settings), METRIC_ALIASES[settings.metric_aliases]
        )
        self._usage_store = RedisUsageStore(settings.required_redis_url, settings.cluster)
        self._quota_store = RedisQuotaStore(settings.required_redis_url, settings.cluster)
        self._response_store = RedisResponseStore(
            settings.required_redis_url, settings.cluster, _response_limits(settings)
        )
        self._response_leases = RedisResponseLeases(settings.required_redis_url, settings.cluster)
        self._kept_answers = RedisKeptAnswers(settings.required_redis_url, settings.cluster)
        self._resumption = Resumption(self._kept_answers, self._clock)
        self._response_service: ResponseService | None = None
        self._span_export = SpanExport(
            self._clock,
            self._metrics.registry,
            role=Role.ROUTER.value,
            process=self._id,
            cluster=settings.cluster,
        )
        self._usage_flusher: UsageFlusher | None = None
        self._conductor_placer: ConductorPlacer | None = None
        self._listeners: HttpListeners | None = None
        self._grammar_checkers: list[GrammarChecker] = []
        self._state = WorkerState.JOINING

    # -- Program ------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all components of the router, and return once its sockets listen. Raises Invalid or
        Unavailable if a component can't start."""
        await wait_for_registry(self._registry, self._clock, self._settings.redis_wait_seconds)
        settings = await asyncio.to_thread(pin_models, self._settings)
        self._cluster = Cluster(self._registry, self._clock)
        self._conductor_placer = ConductorPlacer(self._cluster, self._clock, settings.trust)
        pin_client = GrpcPinClient(settings.trust)
        self._prefix_pinner = PrefixPinner(self._cluster, pin_client, self._clock)
        self._model_paths = settings.served_models
        models = [
            await asyncio.to_thread(self._load_model, name, path)
            for name, path in self._model_paths.items()
        ]
        await self._cluster.refresh()
        await self._wait_for_workers(models)
        for checker in self._grammar_checkers:
            checker.start_helper()
        self._context = self._build_context(models)
        self._adapters = self._context.models.adapters = AdapterDirectory(
            self._cluster, self._adapter_registry, self._clock, self._read_adapter_digest
        )
        self._usage_flusher = self._context.tenants.usage_flusher = self._build_usage_flusher()
        self._batch_service = self._build_batch_service()
        self._response_service = self._build_response_service()
        self._listeners = self._build_listeners()
        self._listeners.open()
        self._heartbeat = Heartbeat(
            self._registry, self._member, self._clock, settings.heartbeat_interval_seconds
        )

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker_connections.run())
            tasks.create_task(self._cluster.run())
            assert self._usage_flusher is not None, "start() comes first"
            tasks.create_task(self._usage_flusher.run())
            tasks.create_task(self._context.tenants.admission.run())
            tasks.create_task(self._prefix_pinner.run())
            tasks.create_task(self._resumption.run())
            tasks.create_task(self._adapters.run())
            assert self._listeners is not None, "start() comes first"
            tasks.create_task(self._listeners.run(self._on_listening))
            tasks.create_task(self._heartbeat.run())
            tasks.create_task(self._batch_service.run())
            if self._response_service is not None:
                tasks.create_task(self._response_service.background.run())

    async def drain(self) -> None:
        """Announce the drain, and return when no request is in flight. New requests go to the other
        routers that share the port, or to the routers that the load balancer picks once it has
        noticed that this router is draining. If there are no other routers, new requests are
        refused."""
        self._context.draining = True
        self._state = WorkerState.DRAINING
        self._heartbeat.announce_now()
        await self._clock.sleep(self._settings.endpoint_grace_seconds)
        if _is_behind_load_balancer(self._settings) and self._listeners is not None:
            await self._listeners.stop_listening()
        while self._context.tenants.request_limiter.num_in_use:
            await self._clock.sleep(DRAIN_POLL_SECONDS)

    async def stop(self) -> None:
        if self._listeners is not None:
            await self._listeners.close()
        if self._response_service is not None:
            await self._response_service.background.stop()
        if self._conductor_placer is not None:
            self._conductor_placer.close()
        await self._forward_client.close()
        for checker in self._grammar_checkers:
            checker.close()
        if self._usage_flusher is not None:
            await self._usage_flusher.stop()
        await self._span_export.close()
        await self._usage_store.close()
        await self._quota_store.close()
        await self._response_store.close()
        await self._response_leases.close()
        await self._kept_answers.close()
        await self._registry.close()
        await self._adapter_registry.close()

    async def apply_settings(self, settings: Settings) -> None:
        """From now on, use the new values of those settings that can change while the router runs.
        Requests in progress keep their timeouts."""
        self._settings, context = settings, self._context
        context.config = _with_live_limits(context.config, settings)
        for model in context.models.all:
            model.generation_context = replace(
                model.generation_context, config=_failover_config(settings)
            )
        context.tenants.request_limiter.set_limit(settings.max_concurrent_requests)
        context.models.limiter.set_limit(settings.max_concurrent_requests)
        context.resources.body_budget.set_limit(settings.max_inflight_body_bytes)
        assert self._listeners is not None, "start() comes first"
        self._listeners.set_max_body_bytes(settings.max_body_bytes)
        self._batch_service.set_limits(_file_limits(settings), settings.max_body_bytes)
        self._metrics.set_slo(_slo_targets(settings))
        await self._span_export.change(settings.trace_endpoint, self._use_spans)
        self._use_spans(self._span_export.sink)

    def _use_spans(self, spans: SpanSink | None) -> None:
        self._context.telemetry.tracer = self._create_tracer(spans)

    @property
    def address(self) -> str:
        """The host:port at which this router can be reached; empty before ``start``."""
        return self._listeners.address if self._listeners is not None else ""

    @property
    def metrics(self) -> CollectorRegistry:
        return self._metrics.registry

    async def _wait_for_workers(self, models: Sequence[ServedModel]) -> None:
        """Wait until each model has a ready worker, but at most ``worker_wait_seconds``. The router
        also starts without workers, and ``/ready`` then reports which models have none."""
        give_up_at = self._clock.monotonic() + self._settings.worker_wait_seconds
        while (
            not all(model.workers.is_ready for model in models)
            and self._clock.monotonic() < give_up_at
        ):
            await self._clock.sleep(WORKER_POLL_SECONDS)
            await self._cluster.refresh()

    # -- parts ----------------------------------------------------------------------------

    def _load_model(self, name: str, path: str) -> ServedModel:
        """Load what the router needs of a model: its limits and its tokenizer. Raises Invalid."""
        settings, folder = self._settings, resolve_model(path)
        limits = load_model_limits(folder)
        reads_defaults = settings.generation_defaults == "model"
        sampling_defaults = SamplingDefaults.load(folder) if reads_defaults else OPENAI_DEFAULTS
        tokenizer = Tokenizer.load(folder, self._clock)
        context_tokens = limits.max_position_embeddings
        workers = self._cluster.workers_of(
            name, min(settings.max_model_tokens or context_tokens, context_tokens)
        )
        checker = GrammarChecker.for_model(folder, limits.vocab_size, limits.eos_token_ids)
        self._grammar_checkers.append(checker)
        assert self._conductor_placer is not None, "start() creates it"
        ring = RingPlacer(workers, self._worker_connections.num_requests)
        generation_context = GenerationContext(
            FallbackPlacer([self._conductor_placer, ring]),
            self._worker_connections,
            self._clock,
            _failover_config(settings),
            vocab_size=limits.vocab_size,
            rank_variants=workers.rank_variants,
            expects_workers=workers.expects_workers,
        )
        model = ServedModel.build(
            tokenizer,
            workers,
            generation_context,
            vocab_size=limits.vocab_size,
            aliases=frozenset({path, without_revision(path)}),
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
            grammar_validator=GrammarValidator(checker.check),
            prefix_pinner=self._prefix_pinner,
            sampling_defaults=sampling_defaults,
        )
        if sampling_defaults != OPENAI_DEFAULTS:
            log.info("generation_defaults", model=name, **sampling_defaults.json)
        form = model.text.output_format
        if form.is_known or not form.supports_tools:
            log.info("output_format", model=name, **form.names)
        else:
            log.warning(
                "tool_format_unknown",
                model=name,
                detail="the chat template does not show how the model writes tool calls; calls in "
                "plain JSON are read; the setting tool_parser names another format",
            )
        return model

    def _read_adapter_digest(self, model: str, path: Path) -> bytes:
        """Read and validate the LoRA adapter in the folder ``path`` for the model with this name,
        and return its digest. Raises Invalid."""
        config = load_model_config(resolve_model(self._model_paths[model]))
        return adapter_digest(path, config, self._settings.max_lora_rank)

    def _build_context(self, models: Sequence[ServedModel]) -> RouterContext:
        settings = self._settings
        config = RouterConfig(
            tenant_secret=settings.tenant_secret,
            control_socket=settings.control_socket,
            cors_origins=settings.cors_origins,
            known_hosts=settings.accepted_hosts(settings.host),
            access_log=settings.access_log,
            refuses_special_tokens=settings.special_tokens_in_messages == "refused",
        )
        return RouterContext.build(
            config=_with_live_limits(config, settings),
            cluster=self._cluster,
            models=models,
            authenticator=Authenticator(settings.api_keys, settings.admin_key),
            clock=self._clock,
            usage_store=self._usage_store,
            quota_store=self._quota_store,
            resumption=self._resumption,
            telemetry=self._build_telemetry(),
            forward_client=self._forward_client,
            refuses_when_draining=not _is_behind_load_balancer(settings),
        )

    def _build_telemetry(self) -> RouterTelemetry:
        settings = self._settings
        peer_routers = PeerRouters(
            self._id,
            lambda: self.address,
            self._cluster,
            settings.tls_certificate,
            settings.admin_key,
        )
        self._span_export.open(settings.trace_endpoint)
        tracer = self._create_tracer(self._span_export.sink)
        return RouterTelemetry(self._metrics, tracer=tracer, peer_routers=peer_routers)

    def _create_tracer(self, spans: SpanSink | None) -> RequestTracer | None:
        if spans is None:
            return None
        return RequestTracer(spans, self._settings.trace_sample, self._clock)

    def _build_usage_flusher(self) -> UsageFlusher:
        """Build the task that writes the tenants' usage to Redis and watches the tenants file, and
        read that file, if there is one. Raises Invalid if the file is invalid."""
        context, path = self._context, self._settings.tenants_file
        authenticator, metrics = context.tenants.authenticator, context.telemetry.metrics.tenants

        def use_directory(directory: TenantDirectory) -> None:
            authenticator.set_directory(directory)
            metrics.add_tenants(authenticator.directory.names)

        watcher = None
        if path is not None:
            watcher = TenantsFileWatcher(Path(path), use_directory, metrics, self._clock)
            watcher.load()
        else:
            metrics.add_tenants(authenticator.directory.names)
        writer = f"{self._id}/{self._incarnation}"
        return UsageFlusher(
            watcher, context.tenants.usage_recorder, self._usage_store, writer, self._clock
        )

    def _build_batch_service(self) -> BatchService:
        settings = self._settings
        folder = settings.batch_folder
        return BatchService(
            self._context,
            BatchStore(Path(folder) if folder else baton_home() / "batches" / settings.cluster),
            requests_per_worker=settings.batch_concurrency,
            max_file_bytes=settings.max_file_bytes,
            folder_bytes=settings.batch_folder_bytes,
            file_limits=_file_limits(settings),
        )

    def _build_response_service(self) -> ResponseService | None:
        """Build the service for stored responses. Return None if the settings say that responses
        are not stored."""
        if not self._settings.response_ttl_seconds:
            return None
        store, leases, authenticator = (
            self._response_store,
            self._response_leases,
            self._context.tenants.authenticator,
        )
        background = BackgroundResponses(
            store, leases, lambda: authenticator.directory, self._clock
        )
        self._metrics.background_responses.set_function(lambda: background.num_running)
        return ResponseService(store, leases, background, self._clock)

    def _build_listeners(self) -> HttpListeners:
        metrics = self._context.telemetry.metrics
        app = build_app(
            self._context, self._batch_service, self._response_service, self._settings.trust
        )
        listeners = HttpListeners(
            self._settings, app, self._clock, metrics.record_refused_connection
        )
        metrics.connections.set_function(lambda: listeners.num_connections)
        return listeners

    def _on_listening(self) -> None:
        limit_free_heap()
        tune_garbage_collector()
        self._state = WorkerState.READY
        self._heartbeat.announce_now()

    def _member(self) -> Member:
        return Member(
            id=self._id,
            role=Role.ROUTER,
            address=self.address,
            generation=self._incarnation,
            state=self._state,
            pid=os.getpid(),
            model=self._settings.model,
            load=WorkerLoad(running=self._context.tenants.request_limiter.num_in_use),
            pending_settings=STATUS.health.pending_settings,
        )


def tune_garbage_collector() -> None:
    """Exempt everything allocated so far from garbage collection, and collect rarely.

    Objects that are created at the start live as long as the process, and reference counting frees
    the objects of requests. A full collection over thousands of idle streams blocks the event loop
    for a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def build(settings: Settings) -> Program:
    return RouterProgram(settings)


def _is_behind_load_balancer(settings: Settings) -> bool:
    """Whether new clients reach another router once this router stops listening, because several
    routers share the port or a load balancer picks a router."""
    return settings.reuse_port or settings.endpoint_grace_seconds > 0


def _with_live_limits(config: RouterConfig, settings: Settings) -> RouterConfig:
    """Return ``config`` with those values of ``settings`` that can change while the router runs."""
    return replace(
        config,
        max_body_bytes=settings.max_body_bytes,
        max_inflight_body_bytes=settings.max_inflight_body_bytes,
        max_concurrent_requests=settings.max_concurrent_requests,
        slo_ttft_seconds=settings.slo_ttft_seconds,
        body_timeout_seconds=settings.body_timeout_seconds,
        strict_fields=settings.strict_fields,
        request_timeout_seconds=settings.request_timeout_seconds,
    )


def _slo_targets(settings: Settings) -> SloTargets:
    return SloTargets(settings.slo_ttft_seconds, settings.slo_itl_seconds)


def _file_limits(settings: Settings) -> FileLimits:
    return FileLimits(
        settings.tenant_files,
        settings.tenant_file_bytes,
        settings.tenant_uploads_per_minute,
        settings.tenant_concurrent_uploads,
    )


def _response_limits(settings: Settings) -> ResponseLimits:
    return ResponseLimits(
        settings.response_ttl_seconds,
        settings.tenant_response_bytes,
        settings.tenant_responses,
        settings.response_bytes,
    )


def _failover_config(settings: Settings) -> FailoverConfig:
    timeouts = TokenTimeouts(
        first_token_timeout_seconds=settings.first_token_timeout_seconds,
        kv_transfer_timeout_seconds=settings.first_token_timeout_seconds,
        next_token_timeout_seconds=settings.next_token_timeout_seconds,
    )
    return FailoverConfig(
        placement_timeout_seconds=settings.placement_timeout_seconds, timeouts=timeouts
    )
