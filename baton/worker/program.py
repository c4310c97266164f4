"""The process of a prefill or decode worker: it loads the model, listens, registers and serves."""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial

import grpc.aio
import structlog
from prometheus_client import CollectorRegistry

from baton.clock import Clock, SystemClock
from baton.config import Settings
from baton.config.pinned_models import pin_models
from baton.core.ids import Incarnation, WorkerId
from baton.core.kv_codec import KvCodecName
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.engine.engine import Engine
from baton.engine.result import StepResult
from baton.engine.runner import ModelRunner
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import parse_layout
from baton.network.address import host_port
from baton.obs.tracing import SpanExport
from baton.registry.adapters import RedisAdapterRegistry
from baton.registry.heartbeat import Heartbeat
from baton.registry.membership import Membership
from baton.registry.redis import RedisRegistry
from baton.registry.startup import wait_for_registry
from baton.rpc.framed.server import FramedServer
from baton.rpc.server import build_server, listen
from baton.rpc.worker_service import add_worker_service, framed_worker_services
from baton.serve.status_pipe import STATUS, report_role
from baton.system.heap import trim_heap
from baton.system.host import host_id
from baton.transport.base import Transport
from baton.transport.selection import open_transports
from baton.transport.stale_peers import StalePeerSweeper
from baton.worker.adapters import WorkerAdapters
from baton.worker.codec_meter import CodecMeter
from baton.worker.codec_speeds import conductor_codecs, measure_codec_speeds
from baton.worker.constraint_opener import ConstraintOpener
from baton.worker.context import WorkerConfig, WorkerContext
from baton.worker.engine_thread import EngineThread
from baton.worker.limits import MAX_DESCRIPTION_CHARACTERS
from baton.worker.model_loading import (
    LoadedModel,
    build_engine,
    configured_codecs,
    engine_config,
    load_model,
)
from baton.worker.numerics_check import check_same_numerics
from baton.worker.role_state import RoleState
from baton.worker.sides import DecodeSide, PrefillSide
from baton.worker.telemetry import WorkerTelemetry
from baton.worker.worker import Worker

log = structlog.get_logger(__name__)

GRAMMAR_IDLE_SECONDS = 30.0
"""Time without a request after which a compiled grammar (about 1 MB) is dropped. Compiling it again
takes milliseconds."""

ENGINE_PROBE_SECONDS = 5.0
"""Interval between checks that the engine's thread still responds."""

RESERVE_AHEAD_STEPS = 2
"""Number of steps that are left to compute of a prompt when the decode worker is told to reserve
blocks. One step would be enough if the decode worker and the link never caused a delay."""


@dataclass(frozen=True, slots=True)
class SideFactories:
    """Functions that open the two sides of a worker, with their connections to other processes.
    Each side is closed after the worker has stopped."""

    open_prefill: Callable[
        [WorkerContext, Settings, Membership], AbstractAsyncContextManager[PrefillSide]
    ]
    open_decode: Callable[[WorkerContext, Settings], AbstractAsyncContextManager[DecodeSide]]


class WorkerProgram:
    """The program of one worker process, which ``baton.serve.process`` runs. ``sides`` opens both
    sides of the worker, whatever its role."""

    def __init__(
        self, settings: Settings, role: Role, sides: SideFactories, clock: Clock | None = None
    ) -> None:
        self._settings = settings
        self._role = role
        self._side_factories = sides
        self._clock = clock or SystemClock()
        self.metrics = CollectorRegistry()
        self._generation = Incarnation(self._clock.wall_nanoseconds())
        self._id = WorkerId(settings.id or f"{role.value}-{os.getpid()}")
        self._registry = RedisRegistry(
            settings.required_redis_url, settings.cluster, settings.cluster_secret, self._clock
        )
        self._membership = Membership(self._registry, self._clock)
        self._adapter_registry = RedisAdapterRegistry(
            settings.required_redis_url, settings.cluster, settings.cluster_secret, self._clock
        )
        self._sides = AsyncExitStack()
        self._server: grpc.aio.Server | None = None
        self._span_export = SpanExport(
            self._clock,
            self.metrics,
            role=role.value,
            process=self._id,
            cluster=settings.cluster,
        )
        self._framed_server: FramedServer | None = None
        self._model: LoadedModel | None = None
        self._crashed: asyncio.Future[None] | None = None
        self._address, self._framed_address = "", ""

    # -- Program ------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the worker. Return when it can serve. Raises Invalid, Unavailable."""
        self._crashed = asyncio.get_running_loop().create_future()
        await wait_for_registry(self._registry, self._clock, self._settings.redis_wait_seconds)
        self._settings = await asyncio.to_thread(pin_models, self._settings)
        self._model = model = await asyncio.to_thread(load_model, self._settings)
        check_same_numerics(
            await self._registry.members(),
            self._id,
            self._settings.model_name,
            model.runner.numerics_fingerprint,
        )
        self._transports = self._open_transports(model)
        self._stale_peer_sweeper = StalePeerSweeper(
            self._transports.values(), self._membership, self._clock
        )
        engine = self._build_engine(model)
        self._adapters = self._build_adapters(model.runner)
        await asyncio.to_thread(self._adapters.load_settings, engine)
        codecs = model.open_codecs()
        self._codec_meter = await asyncio.to_thread(self._measure_codecs, model, codecs)
        context = self._build_context(model, engine, self._codec_meter.metered(codecs))
        self._worker = await self._build_worker(model, context)
        self._heartbeat = Heartbeat(
            self._registry,
            partial(self._member, model.runner, context),
            self._clock,
            self._settings.heartbeat_interval_seconds,
        )
        self._server = await self._listen()

    async def run(self) -> None:
        """Serve until cancelled. If the engine crashes, raise its exception."""
        assert self._crashed is not None and self._model is not None
        self._thread.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker.run())
            tasks.create_task(self._prefill.run())
            tasks.create_task(self._membership.run())
            tasks.create_task(self._stale_peer_sweeper.run())
            tasks.create_task(self._heartbeat.run())
            tasks.create_task(self._probe_engine())
            tasks.create_task(self._drop_unused_grammars())
            tasks.create_task(self._adapters.run())
            await self._crashed

    async def drain(self) -> None:
        """Stop accepting requests; return when no requests are left and the computed blocks are
        published."""
        self._worker.start_drain()
        self._heartbeat.announce_now()
        while not self._worker.is_drained:
            await self._clock.sleep(0.05)

    async def stop(self) -> None:
        if self._model is not None and self._model.grammar_checker is not None:
            self._model.grammar_checker.close()
        if self._framed_server is not None:
            await self._framed_server.close()
        if self._server is not None:
            await self._server.stop(grace=1.0)
            await self._thread.stop()
            if self._model is not None:
                await asyncio.to_thread(self._model.runner.close)
            for transport in self._transports.values():
                await asyncio.to_thread(transport.close)
        await self._sides.aclose()
        await self._span_export.close()
        await self._registry.close()
        await self._adapter_registry.close()

    async def apply_settings(self, settings: Settings) -> None:
        """Apply a changed ``slo_itl_seconds`` and ``trace_endpoint`` without a restart."""
        target = settings.slo_itl_seconds
        await self._thread.call(lambda engine: engine.set_target_inter_token_latency(target))
        await self._span_export.change(settings.trace_endpoint, self._telemetry.use_spans)

    @property
    def address(self) -> str:
        return self._address

    async def _probe_engine(self) -> None:
        """Check regularly that the engine's thread responds, because a hanging device raises no
        error but blocks the thread forever."""
        while True:
            with STATUS.health.waiting_for("the engine"):
                await self._thread.call(lambda engine: None)
            await self._clock.sleep(ENGINE_PROBE_SECONDS)

    async def _drop_unused_grammars(self) -> None:
        """Drop compiled grammars that have not been used for a while, and return their memory to
        the operating system."""
        grammars = self._model.grammars if self._model is not None else None
        while grammars is not None:
            await self._clock.sleep(GRAMMAR_IDLE_SECONDS / 2)
            if grammars.drop_unused(GRAMMAR_IDLE_SECONDS):
                await asyncio.to_thread(trim_heap)

    # -- parts ----------------------------------------------------------------------------

    def _open_transports(self, model: LoadedModel) -> dict[str, Transport]:
        return open_transports(
            self._settings.transports,
            owner=self._id,
            generation=self._generation,
            region=model.kv_region,
            listen_host=self._settings.grpc_host,
            advertise_host=self._settings.advertise_address,
            trust=self._settings.trust,
            nixl_interfaces=self._settings.nixl_interfaces,
            clock=self._clock,
        )

    def _build_engine(self, model: LoadedModel) -> Engine:
        config = engine_config(self._settings, model.runner.limits)
        engine = build_engine(self._settings, model.runner, config, self._clock, model.draft_source)
        self._thread = EngineThread(engine, self._on_step, self._on_crash)
        return engine

    def _build_adapters(self, runner: ModelRunner) -> WorkerAdapters:
        return WorkerAdapters(
            runner.load_adapter,
            self._thread,
            self._adapter_registry,
            self._clock,
            settings=self._settings.own_adapters,
            model=self._settings.model_name,
            on_change=lambda: self._heartbeat.announce_now(),
        )

    def _build_context(
        self, model: LoadedModel, engine: Engine, codecs: Mapping[KvCodecName, BlockCodec]
    ) -> WorkerContext:
        runner, config = model.runner, engine_config(self._settings, model.runner.limits)
        self._telemetry = self._build_telemetry(runner)
        return WorkerContext(
            id=self._id,
            generation=self._generation,
            host=host_id(),
            model_digest=runner.model_digest,
            config=WorkerConfig(
                reserve_ahead_tokens=RESERVE_AHEAD_STEPS * config.max_batched_tokens,
                codec_recent_tokens=self._settings.kv_codec_recent_tokens,
            ),
            engine=self._thread,
            engine_config=config,
            key_hasher=engine.key_hasher,
            layout=model.kv_layout,
            transports=self._transports,
            clock=self._clock,
            telemetry=self._telemetry,
            codecs=codecs,
            staging=model.open_staging() if codecs else None,
        )

    def _measure_codecs(
        self, model: LoadedModel, codecs: Mapping[KvCodecName, BlockCodec]
    ) -> CodecMeter:
        """Measure codecs at the worker's start; return what measures them from then on."""
        speeds = measure_codec_speeds(
            codecs,
            parse_layout(model.kv_layout.name),
            model.runner.pool.device,
            conductor_codecs(configured_codecs(self._settings)),
            self._clock.monotonic,
        )
        for speed in speeds:
            log.info("kv_codec_measured", **asdict(speed))
        return CodecMeter(speeds, model.kv_layout.block_bytes, self._clock)

    async def _build_worker(self, model: LoadedModel, context: WorkerContext) -> Worker:
        settings, checker = self._settings, model.grammar_checker
        self._prefill = await self._sides.enter_async_context(
            self._side_factories.open_prefill(context, settings, self._membership)
        )
        decode = await self._sides.enter_async_context(
            self._side_factories.open_decode(context, settings)
        )
        return Worker(
            context,
            self._prefill,
            decode,
            RoleState(self._role, partial(self._on_state_or_role_change, model.runner)),
            ConstraintOpener(model.grammars, checker.check if checker is not None else None),
            partial(self._has_other_ready_workers, context.variant.id),
        )

    def _build_telemetry(self, runner: ModelRunner) -> WorkerTelemetry:
        self._span_export.open(self._settings.trace_endpoint)
        telemetry = WorkerTelemetry(self._id, self.metrics, self._clock, self._span_export.sink)
        telemetry.gauges.block_bytes = runner.pool.block_bytes
        telemetry.gauges.labels = self._labels(runner, self._role)
        telemetry.gauges.adapters = self._adapters.stats
        return telemetry

    def _labels(self, runner: ModelRunner, role: Role) -> dict[str, str]:
        return {
            "role": role.value,
            "model": self._settings.model_name,
            "device": str(runner.pool.device),
            "kv_dtype": runner.kv_dtype,
            "quantization": runner.quantization,
            "transports": ",".join(self._transports),
        }

    def _has_other_ready_workers(self, variant_id: str) -> bool:
        """Whether another worker of the same variant is ready, to which requests can be rerouted or
        migrated."""
        members = self._membership.current.of_model(self._settings.model_name)
        return any(member.id != self._id for member in members.ready_workers(variant_id=variant_id))

    def _on_state_or_role_change(self, runner: ModelRunner) -> None:
        """Announce a change of the worker's state or role."""
        self._heartbeat.announce_now()
        self._telemetry.gauges.labels = self._labels(runner, self._worker.role)
        if self._worker.state is not WorkerState.DRAINING:
            report_role(self._worker.role.value, self._address)

    def _on_step(self, result: StepResult) -> None:
        self._worker.on_step(result)

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

    def _member(self, runner: ModelRunner, context: WorkerContext) -> Member:
        variant = context.variant
        return Member(
            id=self._id,
            role=self._worker.role,
            address=self._address,
            generation=self._generation,
            state=self._worker.state if self._server else WorkerState.GONE,
            host=context.host,
            pid=os.getpid(),
            model=self._settings.model_name,
            model_digest=variant.model_digest,
            block_tokens=variant.block_tokens,
            kv_dtype=variant.kv_dtype,
            kv_layout=variant.kv_layout,
            kv_bytes_per_token=runner.pool.block_bytes
            * context.engine_config.num_groups
            // runner.block_tokens,
            device=runner.pool.device,
            computed_by=runner.description[:MAX_DESCRIPTION_CHARACTERS],
            max_model_tokens=context.engine_config.max_model_tokens,
            transports=tuple(self._transports),
            framed_address=self._framed_address,
            numerics_fingerprint=runner.numerics_fingerprint,
            adapters=self._adapters.announced,
            load=self._worker.load,
            pending_settings=STATUS.health.pending_settings,
            kv_codecs=configured_codecs(self._settings),
            codec_speeds=self._codec_meter.speeds(),
        )
