"""The conductor process: it joins the cluster, serves placement requests, and plans pool sizes."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping

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
from baton.obs.tracing import SpanExport
from baton.pools.kubernetes.open import kubernetes_client_for, open_initial_sizes
from baton.registry.heartbeat import Heartbeat
from baton.registry.membership import Membership
from baton.registry.redis import RedisRegistry
from baton.registry.startup import wait_for_registry
from baton.rpc.conductor_service import add_conductor_service, framed_conductor_services
from baton.rpc.framed.server import FramedServer
from baton.rpc.kvstore_client import KvStoreClient
from baton.rpc.server import build_server, listen
from baton.serve.lifecycle import Program
from baton.serve.status_pipe import STATUS
from conductor.conductor import ConductorConfig
from conductor.leader_autoscaler import LeaderAutoscaler
from conductor.metrics import ClusterGauges, ConductorMetrics
from conductor.model_conductors import ModelConductors
from conductor.planner import PLAN_SECONDS, PlannerConfig
from conductor.policy.policies import get_policy
from conductor.policy.sizing import SizingConfig
from conductor.store_mirror import StoreMirror, StoreWatcher, reporting_workers
from conductor.telemetry import ConductorTelemetry


class TerminatingPodWatcher:
    """Calls ``on_change`` in the event loop with the set of all workers whose pods are being
    deleted, whenever that set changes. The watch starts on construction. Raises Invalid if no API
    server is configured."""

    def __init__(
        self, settings: Settings, on_change: Callable[[frozenset[WorkerId]], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_change = on_change
        self._client = kubernetes_client_for(settings)
        from baton.pools.kubernetes.pod_watch import PodWatch

        self._watch = PodWatch(self._client, settings.cluster, self._forward)
        self._watch.start()

    def close(self) -> None:
        self._watch.stop()
        self._client.close()

    def _forward(self, leaving: frozenset[WorkerId]) -> None:
        """Forward a change to the event loop; called in the watch's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_change, leaving)


class ConductorProgram:
    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self.metrics = CollectorRegistry()
        self._generation = Incarnation(self._clock.wall_nanoseconds())
        self._id = WorkerId(settings.id or f"conductor-{os.getpid()}")
        self._registry = RedisRegistry(
            settings.required_redis_url, settings.cluster, settings.cluster_secret, self._clock
        )
        self._membership = Membership(self._registry, self._clock)
        self._server: grpc.aio.Server | None = None
        self._span_export = SpanExport(
            self._clock,
            self.metrics,
            role=Role.CONDUCTOR.value,
            process=self._id,
            cluster=settings.cluster,
        )
        self._framed_server: FramedServer | None = None
        self._framed_address = ""
        self._state = WorkerState.READY
        self._address = ""
        self._pod_watcher: TerminatingPodWatcher | None = None
        self._autoscaler = LeaderAutoscaler.from_settings(
            settings, self._id, self._fetch_plan, self._clock
        )
        self._autoscaler_task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return self._address

    async def start(self) -> None:
        """Start serving. Raises Unavailable if the registry does not respond or a port can't be
        bound. Raises Invalid for an unknown placement policy, for certificates that can't be read,
        or if pools in Kubernetes can't be watched or resized as the settings require."""
        settings = self._settings
        get_policy(settings.placement_policy)
        if self._autoscaler is not None:
            self._autoscaler.check()
        await wait_for_registry(self._registry, self._clock, settings.redis_wait_seconds)
        await self._membership.refresh()
        mirror, reported = StoreMirror(), StoreMirror()
        self._conductor = ModelConductors(
            self._membership, mirror, self._clock, _config(settings), reported
        )
        if settings.kubernetes_watch:
            self._pod_watcher = TerminatingPodWatcher(settings, self._conductor.set_leaving_workers)
        telemetry = self._telemetry = self._build_telemetry(mirror)
        self._watchers = (
            StoreWatcher(mirror, self._membership, self._watch, self._clock),
            StoreWatcher(reported, self._membership, self._watch, self._clock, reporting_workers),
        )
        self._server = build_server(settings.trust)
        add_conductor_service(self._server, telemetry)
        port = await listen(
            self._server,
            settings.grpc_host,
            settings.grpc_port,
            settings.trust,
            settings.advertise_address,
        )
        host = settings.advertise_address or settings.grpc_host
        self._address = host_port(host, port)
        self._framed_server = FramedServer(settings.trust, framed_conductor_services(telemetry))
        framed_port = await self._framed_server.listen(settings.grpc_host, settings.framed_port)
        self._framed_address = host_port(host, framed_port)
        self._heartbeat = Heartbeat(
            self._registry, self._member, self._clock, settings.heartbeat_interval_seconds
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._membership.run())
            tasks.create_task(self._heartbeat.run())
            for watcher in self._watchers:
                tasks.create_task(watcher.run())
            tasks.create_task(self._run_planner())
            if self._settings.kubernetes_pools or self._settings.kubernetes_initial_replicas:
                tasks.create_task(self._size_new_deployments())
            if self._autoscaler is not None:
                self._autoscaler_task = tasks.create_task(self._autoscaler.run())

    async def apply_settings(self, settings: Settings) -> None:
        """From now on, use the new values of those settings that can change while the conductor
        runs."""
        self._settings = settings
        self._conductor.set_config(_config(settings))
        await self._span_export.change(settings.trace_endpoint, self._telemetry.use_spans)

    async def drain(self) -> None:
        """Announce the drain, so that routers use other conductors, and stop resizing pools, so
        that another conductor can. There are no requests to wait for, since a placement takes
        microseconds."""
        self._state = WorkerState.DRAINING
        self._heartbeat.announce_now()
        if self._autoscaler_task is not None:
            self._autoscaler_task.cancel()
            await asyncio.wait([self._autoscaler_task])

    async def stop(self) -> None:
        if self._pod_watcher is not None:
            self._pod_watcher.close()
        if self._framed_server is not None:
            await self._framed_server.close()
        if self._server is not None:
            await self._server.stop(grace=1.0)
        await self._span_export.close()
        await self._registry.close()

    def _build_telemetry(self, mirror: StoreMirror) -> ConductorTelemetry:
        clock = self._clock
        plans, autoscaler = self._conductor.pool_plans, self._autoscaler
        is_leader = (lambda: autoscaler.is_leader) if autoscaler is not None else (lambda: False)
        self.metrics.register(ClusterGauges(self._membership, mirror, plans, clock, is_leader))
        self._span_export.open(self._settings.trace_endpoint)
        metrics = ConductorMetrics(self.metrics, self._settings.placement_policy)
        return ConductorTelemetry(self._conductor, metrics, clock, self._id, self._span_export.sink)

    async def _run_planner(self) -> None:
        while True:
            await self._clock.sleep(PLAN_SECONDS)
            self._conductor.plan_pools()

    async def _size_new_deployments(self) -> None:
        opened = open_initial_sizes(self._settings, self._initial_replicas, self._clock)
        async with opened as sizes:
            await sizes.run()

    def _initial_replicas(self) -> Mapping[str, int]:
        return self._settings.kubernetes_initial_replicas

    async def _fetch_plan(self) -> PoolPlan | None:
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
            framed_address=self._framed_address,
            pending_settings=STATUS.health.pending_settings,
        )


def build(settings: Settings) -> Program:
    return ConductorProgram(settings)


def _config(settings: Settings) -> ConductorConfig:
    admission = settings.admission
    return ConductorConfig(
        policy=settings.placement_policy,
        admission=None if admission == "auto" else admission,
        max_short_prompt_advantage=settings.max_short_prompt_advantage,
        local_prefill=None if settings.local_prefill == "auto" else settings.local_prefill,
        ttft_slo_seconds=settings.slo_ttft_seconds,
        itl_slo_seconds=settings.slo_itl_seconds,
        planner=_planner_config(settings),
    )


def _planner_config(settings: Settings) -> PlannerConfig:
    """Build the planner's configuration. If the settings have no TTFT SLO, the pools are sized with
    the default TTFT SLO."""
    default = SizingConfig()
    sizing = SizingConfig(
        min_prefill=settings.min_prefill,
        max_prefill=settings.max_prefill,
        min_decode=settings.min_decode,
        max_decode=settings.max_decode,
        utilisation=settings.autoscale_utilisation,
        shrink_utilisation=settings.autoscale_shrink_utilisation,
        shrink_seconds=settings.autoscale_shrink_seconds,
        ttft_slo_seconds=settings.slo_ttft_seconds or default.ttft_slo_seconds,
        itl_slo_seconds=settings.slo_itl_seconds,
    )
    return PlannerConfig(
        sizing=sizing,
        start_seconds=settings.autoscale_start_seconds,
        max_batch=settings.max_sequences,
    )
