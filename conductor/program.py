"""The conductor as a program."""

import asyncio
import os
from collections.abc import AsyncIterator

import grpc.aio
from prometheus_client import CollectorRegistry

from baton.clock import Clock, SystemClock
from baton.config import Settings
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role, WorkerState
from baton.core.store import WatchEvent
from baton.network.address import host_port
from baton.obs.tracing import ClosableSpanSink, close_span_sink, open_span_sink
from baton.registry.heartbeat import Heartbeat
from baton.registry.membership import Membership
from baton.registry.redis import RedisRegistry
from baton.registry.startup import wait_for_registry
from baton.rpc.conductor_service import add_conductor_service
from baton.rpc.framed.conductor_service import framed_conductor_services
from baton.rpc.framed.server import FramedServer
from baton.rpc.kvstore_client import KvStoreClient
from baton.rpc.server import build_server, listen
from baton.serve.lifecycle import Program
from conductor.conductor import Conductor, ConductorConfig
from conductor.leader_autoscaler import LeaderAutoscaler
from conductor.metrics import ClusterGauges, ConductorMetrics
from conductor.planner import PLAN_SECONDS, PlannerConfig
from conductor.policy.policies import get_policy
from conductor.policy.sizing import SizingConfig
from conductor.store_mirror import StoreMirror, StoreWatcher
from conductor.telemetry import ConductorTelemetry
from conductor.terminating_pods import TerminatingPodWatcher


class ConductorProgram:
    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self.metrics = CollectorRegistry()
        self._generation = Incarnation(self._clock.wall_nanoseconds())
        self._id = WorkerId(settings.id or f"conductor-{os.getpid()}")
        self._registry = RedisRegistry(
            settings.needs_redis_url, settings.cluster, settings.cluster_secret, self._clock
        )
        self._membership = Membership(self._registry, self._clock)
        self._server: grpc.aio.Server | None = None
        self._spans: ClosableSpanSink | None = None
        self._lines: FramedServer | None = None
        self._line = ""
        self._state = WorkerState.READY
        self._address = ""
        self._pods: TerminatingPodWatcher | None = None
        self._resizer = LeaderAutoscaler.of(settings, self._id, self._tell_plan, self._clock)
        self._resizing: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return self._address

    async def start(self) -> None:
        """Raises Unavailable, Invalid for a placement policy that there isn't, or for pools in
        Kubernetes that can't be watched or resized as the settings want it."""
        settings = self._settings
        get_policy(settings.placement_policy)
        if self._resizer is not None:
            self._resizer.check()
        await wait_for_registry(self._registry, self._clock, settings.redis_wait_seconds)
        await self._membership.refresh()
        mirror = StoreMirror()
        self._conductor = Conductor(self._membership, mirror, self._clock, _config(settings))
        if settings.kubernetes_watch:
            self._pods = TerminatingPodWatcher(settings, self._conductor.leave)
        witness = self._witness(mirror)
        self._watchers = StoreWatcher(mirror, self._membership, self._watch, self._clock)
        self._server = build_server(settings.trust)
        add_conductor_service(self._server, witness)
        port = await listen(
            self._server,
            settings.grpc_host,
            settings.grpc_port,
            settings.trust,
            settings.advertise_address,
        )
        host = settings.advertise_address or settings.grpc_host
        self._address = host_port(host, port)
        self._lines = FramedServer(settings.trust, framed_conductor_services(witness))
        line_port = await self._lines.listen(settings.grpc_host, settings.line_port)
        self._line = host_port(host, line_port)
        self._heartbeat = Heartbeat(
            self._registry, self._member, self._clock, settings.heartbeat_seconds
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._membership.run())
            tasks.create_task(self._heartbeat.run())
            tasks.create_task(self._watchers.run())
            tasks.create_task(self._plan())
            if self._resizer is not None:
                self._resizing = tasks.create_task(self._resizer.run())

    async def drain(self) -> None:
        """A placement takes microseconds; routers learn that they should ask another, and another
        one resizes the pools."""
        self._state = WorkerState.DRAINING
        self._heartbeat.hurry()
        if self._resizing is not None:
            self._resizing.cancel()
            await asyncio.wait([self._resizing])

    async def stop(self) -> None:
        if self._pods is not None:
            self._pods.close()
        if self._lines is not None:
            await self._lines.close()
        if self._server is not None:
            await self._server.stop(grace=1.0)
        await close_span_sink(self._spans)
        await self._registry.close()

    def _witness(self, mirror: StoreMirror) -> ConductorTelemetry:
        settings, clock = self._settings, self._clock
        plan, resizer = self._conductor.pool_plan, self._resizer
        leads = (lambda: resizer.leads) if resizer is not None else (lambda: False)
        self.metrics.register(ClusterGauges(self._membership, mirror, plan, clock, leads))
        self._spans = open_span_sink(
            settings.trace_endpoint,
            clock,
            self.metrics,
            role=Role.CONDUCTOR.value,
            process=self._id,
            cluster=settings.cluster,
        )
        metrics = ConductorMetrics(self.metrics)
        return ConductorTelemetry(self._conductor, metrics, clock, self._id, self._spans)

    async def _plan(self) -> None:
        while True:
            await self._clock.sleep(PLAN_SECONDS)
            self._conductor.plan_pools()

    async def _tell_plan(self) -> PoolPlan | None:
        return self._conductor.pool_plan()

    async def _watch(
        self, node: Member, generation: Incarnation, number: int
    ) -> AsyncIterator[WatchEvent]:
        client = KvStoreClient(node.address, self._settings.trust)
        try:
            async for page in client.watch(generation, number):
                yield page
        finally:
            await client.close()

    def _member(self) -> Member:
        return Member(
            id=self._id,
            role=Role.CONDUCTOR,
            address=self._address,
            generation=self._generation,
            state=self._state,
            pid=os.getpid(),
            line=self._line,
        )


def build(settings: Settings) -> Program:
    return ConductorProgram(settings)


def _config(settings: Settings) -> ConductorConfig:
    admission = settings.admission
    return ConductorConfig(
        policy=settings.placement_policy,
        admission=None if admission == "auto" else admission,
        read_alone=None if settings.read_alone == "auto" else settings.read_alone,
        first_token_seconds=settings.slo_first_token_seconds,
        token_gap_seconds=settings.slo_token_gap_seconds,
        planner=_planner_config(settings),
    )


def _planner_config(settings: Settings) -> PlannerConfig:
    """Without a promise, a queue may be as long as by default."""
    default = SizingConfig()
    sizing = SizingConfig(
        min_prefill=settings.min_prefill,
        max_prefill=settings.max_prefill,
        min_decode=settings.min_decode,
        max_decode=settings.max_decode,
        utilisation=settings.autoscale_utilisation,
        shrink_utilisation=settings.autoscale_shrink_utilisation,
        shrink_seconds=settings.autoscale_shrink_seconds,
        first_token_seconds=settings.slo_first_token_seconds or default.first_token_seconds,
        token_gap_seconds=settings.slo_token_gap_seconds,
    )
    return PlannerConfig(
        sizing=sizing,
        start_seconds=settings.autoscale_start_seconds,
        max_batch=settings.max_running,
    )
