"""Pools of workers that are Ray actors. Each actor reserves resources of its own, on any node where
they are free.

Ray restarts an actor when the actor or its node dies; the actor restarts its worker when the worker
dies (:mod:`orchestrator.ray.actor`). When the supervisor exits, so do the actors.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import structlog

from baton.clock import Clock
from baton.core.states import Role
from orchestrator.child_process import BACKOFF_SECONDS, START_ATTEMPTS, STOP_SECONDS
from orchestrator.cluster_state import ProcessState
from orchestrator.launch_specs import LaunchSpecs, RemoteWorkerSpec
from orchestrator.ray.cluster import ActorLost, PlacedActor, RayCluster
from orchestrator.supervised_pools import OnChange, SupervisedPools, SupervisedProcess

POLL_SECONDS = 1.0
"""The interval between two checks of which resources a worker is waiting for."""

STOP_REPORT_SECONDS = 5.0
"""The time that an actor has to report that its worker has stopped."""

log = structlog.get_logger(__name__)


class RayPools(SupervisedPools):
    def __init__(self, launch_specs: LaunchSpecs, cluster: RayCluster, clock: Clock) -> None:
        super().__init__()
        self._launch_specs = launch_specs
        self._cluster = cluster
        self._clock = clock

    async def check_capacity(self, sizes: Mapping[Role, int]) -> None:
        await self._cluster.check_capacity(sum(sizes.values()))

    def _create_process(self, role: Role, on_change: OnChange) -> SupervisedProcess:
        return RayWorkerProcess(
            self._launch_specs.remote_worker(role), self._cluster, self._clock, on_change
        )


class RayWorkerProcess:
    """Keeps one worker alive on Ray until it is stopped. Creates a new actor when the actor is
    lost."""

    def __init__(
        self, spec: RemoteWorkerSpec, cluster: RayCluster, clock: Clock, on_change: OnChange
    ) -> None:
        self.state = ProcessState(spec.id, spec.role, 0, "pending")
        self._spec = spec
        self._cluster = cluster
        self._clock = clock
        self._on_change = on_change
        self._placing: asyncio.Future[PlacedActor] | None = None
        self._has_answered = False
        self._has_served = False
        self._failed = False
        self._num_lost = 0
        self._num_restarts = 0
        self._stop_requested = asyncio.Event()
        self._abandoned = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        return self.state.state == "serving"

    @property
    def is_stopping(self) -> bool:
        return self._stop_requested.is_set()

    @property
    def has_failed_to_start(self) -> bool:
        return self._ended.is_set() and self._failed and not self.is_stopping

    async def run(self) -> None:
        living = asyncio.ensure_future(self._run_actors())
        giving_up = asyncio.ensure_future(self._abandoned.wait())
        try:
            await asyncio.wait([living, giving_up], return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                living.result()
        finally:
            living.cancel()
            giving_up.cancel()
            await asyncio.wait([living, giving_up])
            await self._release_actor()
            self._ended.set()
            self._set_state("stopped" if self.is_stopping else "failed")

    async def stop(self) -> None:
        """Make the actor drain its worker; kill the actor if that takes too long."""
        self._stop_requested.set()
        if self._ended.is_set():
            return
        self._set_state("draining")
        if not self._has_answered:
            self._abandoned.set()
        asking = asyncio.ensure_future(self._request_stop())
        try:
            async with asyncio.timeout(
                self._spec.drain_timeout_seconds + STOP_SECONDS + STOP_REPORT_SECONDS
            ):
                await self._ended.wait()
        except TimeoutError:
            log.warning("killed", id=self._spec.id, reason="it took too long to stop")
            self.kill()
            await self._ended.wait()
        finally:
            asking.cancel()

    def hold(self) -> None:
        """Do nothing: a worker on Ray is started with these signals blocked, or elsewhere."""

    def kill(self) -> None:
        self._abandoned.set()

    # -- one actor after the other ------------------------------------------------------------

    async def _run_actors(self) -> None:
        while not (self.is_stopping or self._failed):
            try:
                await self._run_actor()
            except ActorLost as lost:
                if self.is_stopping:
                    return
                await self._prepare_new_actor(str(lost))

    async def _run_actor(self) -> None:
        """Run one actor until its worker has exited for good. Raises ActorLost when Ray no longer
        restarts the actor."""
        self._placing = asyncio.ensure_future(self._cluster.create_actor(self._spec))
        placed, seen = await asyncio.shield(self._placing), -1
        while True:
            try:
                news = await self._wait_for_state(placed, seen)
            except ActorLost as lost:
                if lost.is_permanent or self.is_stopping:
                    raise
                if self._has_answered:
                    self._report_restart(str(lost))
                else:
                    await self._report_waiting(placed)
                await self._clock.sleep(POLL_SECONDS)
                seen = -1
                continue
            seen = news["number"]
            self._apply_state(placed, news)
            if news["ended"]:
                self._failed = news["failed_to_start"]
                return

    async def _wait_for_state(self, placed: PlacedActor, seen: int) -> dict[str, Any]:
        """Return the actor's next state. Until the actor first responds, report which resources it
        waits for."""
        asking = asyncio.ensure_future(self._cluster.call_actor(placed, "follow", seen))
        try:
            while not (await asyncio.wait([asking], timeout=POLL_SECONDS))[0]:
                if not self._has_answered:
                    await self._report_waiting(placed)
            news: dict[str, Any] = asking.result()
            return news
        finally:
            asking.cancel()

    async def _prepare_new_actor(self, why: str) -> None:
        """Release an actor that was lost, and wait before the next one is created. If the worker
        has never served and ``START_ATTEMPTS`` actors were lost, mark it as failed instead."""
        self._report_restart(why)
        await self._release_actor()
        self._num_lost += 1
        self._failed = not self._has_served and self._num_lost >= START_ATTEMPTS
        if not self._failed:
            seconds = BACKOFF_SECONDS[min(self._num_lost, len(BACKOFF_SECONDS)) - 1]
            await self._clock.sleep(seconds)

    async def _release_actor(self) -> None:
        placing, self._placing = self._placing, None
        if placing is not None:
            with contextlib.suppress(ActorLost):
                await self._cluster.release_actor(await placing)

    async def _request_stop(self) -> None:
        if self._placing is not None and self._placing.done():
            with contextlib.suppress(ActorLost):
                await self._cluster.call_actor(self._placing.result(), "stop")

    # -- state --------------------------------------------------------------------------------

    def _apply_state(self, placed: PlacedActor, news: dict[str, Any]) -> None:
        state = ProcessState(**news["state"])
        self._cluster.record_node(placed, news["node_id"])
        elsewhere = self._cluster.spans_machines and news["ip"] != self._cluster.supervisor_host
        state.node = news["ip"] if elsewhere else ""
        state.restarts += self._num_restarts
        self._has_answered = True
        self._has_served = self._has_served or state.state == "serving"
        self.state = state
        self._set_state(state.state)

    async def _report_waiting(self, placed: PlacedActor) -> None:
        self.state.message = await self._cluster.describe_missing_resources(placed)
        self._set_state("pending" if self.state.message else "starting")

    def _report_restart(self, why: str) -> None:
        log.warning("actor_lost", id=self._spec.id, reason=why)
        self._has_answered = False
        self._num_restarts += 1
        restarts = self.state.restarts + 1
        self.state = ProcessState(
            self._spec.id, self._spec.role, 0, "restarting", restarts=restarts, message=why
        )
        self._set_state("restarting")

    def _set_state(self, state: str) -> None:
        is_draining = self.is_stopping and state not in ("stopped", "failed")
        self.state.state = "draining" if is_draining else state
        self._on_change(self)
