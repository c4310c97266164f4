"""The supervisor of ``baton up``, which starts all processes, keeps them alive, and stops them in
order."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import structlog

from baton.clock import Clock
from baton.config import Settings
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role
from baton.errors import DeadlineExceeded, Unavailable
from baton.obs.lost_writes import LOST_WRITES
from baton.pools import autoscaler
from baton.pools.model_pools import ModelPools
from baton.rpc.conductor_client import fetch_pool_plan, fetch_ready_workers
from baton.rpc.worker_client import convert_worker
from orchestrator.child_process import ChildProcess, ChildProcessSpec
from orchestrator.cluster_state import ClusterFolder, ClusterState
from orchestrator.launch_specs import LaunchSpecs
from orchestrator.local_pools import LocalPools
from orchestrator.preflight import (
    check_port,
    check_redis,
    http_url,
    reachable_host,
    router_obstacle,
)
from orchestrator.supervised_pools import SupervisedPools, SupervisedProcess

READY_POLL_SECONDS = 0.05
STATE_RETRY_SECONDS = 1.0
"""A state that could not be written is written again after this time."""

STATE_FILE = "state.json"
OBSTACLE_SECONDS = 5.0
"""When all processes serve, the cluster is ready within a second or two. If it is not ready after
this time, the supervisor says why."""

ROUTER_POLL_SECONDS = 1.0
STOPPED_AFTER_POOLS = (Role.CONDUCTOR, Role.KVSTORE, Role.REDIS)
"""The roles that stop after the routers and the workers, in this order, so that whatever a draining
process needs is still running."""

log = structlog.get_logger(__name__)


class Supervisor:
    """Owns the processes of one cluster, except for the workers, which ``pools`` owns: each model
    has pools of its own.
    ``on_change`` is called with every new state of the cluster.

    Before the supervisor starts anything, it checks that the router's port is free, that the
    backend can run the workers, and, if a Redis URL is given, that Redis responds.
    """

    def __init__(
        self,
        settings: Settings,
        folder: ClusterFolder,
        clock: Clock,
        on_change: Callable[[ClusterState], None] = lambda state: None,
        launch_specs: LaunchSpecs | None = None,
        pools: Mapping[str, SupervisedPools] | None = None,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._clock = clock
        self._on_change = on_change
        self._launch_specs = launch_specs or LaunchSpecs(settings, folder)
        self._pools = pools or {
            model: LocalPools(
                specs,
                clock,
                settings.drain_timeout_seconds,
                settings.hang_timeout_seconds,
                partial(convert_worker, trust=settings.trust),
            )
            for model, specs in self._launch_specs.by_model().items()
        }
        self._children: dict[str, ChildProcess] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self._has_started = False
        self._routers_ready = False
        self._failure = ""
        self._obstacle = ""
        self._settings_status: dict[str, Any] = {}
        self._state_retry: asyncio.TimerHandle | None = None

    @property
    def pools(self) -> ModelPools:
        return ModelPools(self._pools)

    @property
    def is_ready(self) -> bool:
        """Whether the routers accept requests and all processes serve, except for those that are
        stopping."""
        return self._routers_ready and self._all_serve()

    def set_settings_status(self, status: dict[str, Any]) -> None:
        """Publish in the cluster's state how the settings differ from those with which the cluster
        was started."""
        self._settings_status = status
        self._publish_state()

    async def run(self, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
        """Start all processes and keep them running until ``stop`` is set. Then drain them; if
        ``stop_now`` is set, kill them instead. Raises Invalid or Unavailable if the cluster can't
        start; in this case no process is left running."""
        self._check_folder()
        check_port(self._settings.host, self._settings.port)
        if not self._launch_specs.has_embedded_redis:
            await asyncio.to_thread(
                check_redis, self._launch_specs.redis_url, self._settings.cluster
            )
        await self._check_capacity()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await self._start_all(stop)
                    await self._run_until(stop)
                finally:
                    await self._stop_all(stop_now)
        finally:
            self._publish_state()
            if self._state_retry is not None:
                self._state_retry.cancel()
        if self._failure:
            raise Unavailable(self._failure)

    @property
    def _initial_sizes(self) -> Mapping[Role, int]:
        """The sizes of each model's pools at the start, without the pools that stay empty."""
        return {role: size for role, size in self._settings.pool_sizes.items() if size}

    def _check_folder(self) -> None:
        """Raise Unavailable if the cluster's state can't be written: ``baton`` commands would not
        find the cluster."""
        try:
            self._folder.write_state(self._current_state())
        except OSError as error:
            reason = error.strerror or error
            raise Unavailable(f"{self._folder.path} can't be written: {reason}") from error

    async def _check_capacity(self) -> None:
        """Raise Unavailable if the backend can't run all models' workers."""
        any_pools = next(iter(self._pools.values()))
        sizes = {role: len(self._pools) * count for role, count in self._initial_sizes.items()}
        await any_pools.check_capacity(sizes)

    # -- starting and stopping --------------------------------------------------------------

    async def _start_all(self, stop: asyncio.Event) -> None:
        """Start Redis first, then all other processes at the same time. Each process waits for the
        processes that it needs."""
        if self._launch_specs.has_embedded_redis:
            self._start(self._launch_specs.redis())
            await self._wait_until(self._all_serve, stop)
        if stop.is_set() or self._failure:
            return
        if not (self._settings.mock or self._settings.has_server_workers):  # they keep no KV there
            self._start(self._launch_specs.store())
        self._start(self._launch_specs.conductor())
        assert self._tasks is not None
        for pools in self._pools.values():
            pools.open(self._tasks, self._on_process_change)
            await pools.scale(self._initial_sizes)
        for router in self._launch_specs.routers():
            self._start(router)
        await self._wait_until(self._all_serve, stop)
        await self._wait_until_clear(self._find_conductor_obstacle, stop)
        await self._wait_until_clear(self._find_router_obstacle, stop)
        if not (stop.is_set() or self._failure):
            self._has_started = self._routers_ready = True
            self._publish_state()

    async def _run_until(self, stop: asyncio.Event) -> None:
        """Keep the processes running until ``stop`` is set, or the cluster can't start. Run the
        autoscaler meanwhile, unless the settings say that a conductor runs it."""
        assert self._tasks is not None
        following = [
            self._tasks.create_task(each) for each in (self._autoscale(), self._watch_routers())
        ]
        try:
            await self._wait_until(lambda: False, stop)
        finally:
            for task in following:
                task.cancel()

    async def _autoscale(self) -> None:
        """Run an autoscaler for the pools of each model."""
        if self._settings.autoscale_pools != "supervisor":
            return
        async with asyncio.TaskGroup() as tasks:
            for model, pools in self._pools.items():
                tasks.create_task(
                    autoscaler.run_autoscaler(
                        self._settings,
                        pools,
                        partial(self._fetch_pool_plan, model),
                        self._clock,
                        pools.can_convert,
                    )
                )

    async def _fetch_pool_plan(self, model: str) -> PoolPlan | None:
        address = self._children[Role.CONDUCTOR].state.address
        if not address:
            return None
        return await fetch_pool_plan(address, self._settings.trust, model=model)

    async def _wait_until_clear(
        self, find_obstacle: Callable[[], Awaitable[str]], stop: asyncio.Event
    ) -> None:
        """Wait until ``find_obstacle`` returns an empty text, ``stop`` is set, or the cluster can't
        start. Publish an obstacle that is there after ``OBSTACLE_SECONDS``."""
        say_at = self._clock.monotonic() + OBSTACLE_SECONDS
        while not (stop.is_set() or self._failure) and (obstacle := await find_obstacle()):
            if self._clock.monotonic() >= say_at and obstacle != self._obstacle:
                self._obstacle = obstacle
                self._publish_state()
            await self._clock.sleep(READY_POLL_SECONDS)
        self._obstacle = ""

    async def _find_conductor_obstacle(self) -> str:
        """Return which serving workers the conductor does not know. It learns of a worker from the
        registry, some time after the worker has begun to serve; until then the workers that it
        knows would get all requests."""
        address = self._children[Role.CONDUCTOR].state.address
        if not address:
            return "the conductor is being restarted"
        workers = [each for pools in self._pools.values() for each in await pools.workers()]
        try:
            known = await fetch_ready_workers(address, self._settings.trust)
        except (Unavailable, DeadlineExceeded) as error:
            return f"the conductor does not respond: {error}"
        unknown = [each.id for each in workers if each.state == "serving" and each.id not in known]
        return f"the conductor does not know {', '.join(unknown)}" if unknown else ""

    async def _watch_routers(self) -> None:
        """Publish whether the routers are ready: they may lose all workers of a model, or restart
        while Redis is down."""
        while True:
            await self._clock.sleep(ROUTER_POLL_SECONDS)
            obstacle = await self._find_router_obstacle()
            if obstacle != self._obstacle:
                self._obstacle, self._routers_ready = obstacle, not obstacle
                self._publish_state()

    async def _find_router_obstacle(self) -> str:
        return await asyncio.to_thread(self._query_routers)

    def _query_routers(self) -> str:
        """Return why a router is not ready. It is ready when it knows the workers, which is later
        than when it starts to serve. Each router is queried on its own port, since on the shared
        port any router may respond."""
        host, certificate = reachable_host(self._settings.host), self._settings.tls_certificate
        ports = [int(each.state.address.rpartition(":")[2] or 0) for each in self._routers()]
        obstacles = (router_obstacle(host, port, certificate) for port in ports)
        return next(filter(None, obstacles), "")

    def _routers(self) -> list[ChildProcess]:
        return [child for child in self._children.values() if child.spec.role == Role.ROUTER]

    async def _stop_all(self, stop_now: asyncio.Event) -> None:
        hurrying = asyncio.ensure_future(self._kill_all_on(stop_now))
        for keeper in self._all_processes():
            keeper.hold()
        for pools in self._pools.values():
            pools.close()
        try:
            await asyncio.gather(*(router.stop() for router in self._routers()))
            await asyncio.gather(*(pools.stop() for pools in self._pools.values()))
            for role in STOPPED_AFTER_POOLS:
                await self._stop_child(role)
        finally:
            hurrying.cancel()

    async def _stop_child(self, role: Role) -> None:
        if role in self._children:
            await self._children[role].stop()

    async def _kill_all_on(self, stop_now: asyncio.Event) -> None:
        await stop_now.wait()
        for keeper in self._all_processes():
            keeper.kill()

    async def _wait_until(self, condition: Callable[[], bool], stop: asyncio.Event) -> None:
        """Wait for ``condition``. Return early if ``stop`` is set, or if the cluster can't
        start."""
        while not (condition() or stop.is_set() or self._failure):
            self._changed.clear()
            waits = [asyncio.ensure_future(event.wait()) for event in (self._changed, stop)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    def _start(self, spec: ChildProcessSpec) -> None:
        assert self._tasks is not None
        settings = self._settings
        child = ChildProcess(
            spec,
            self._clock,
            self._on_process_change,
            settings.drain_timeout_seconds,
            settings.hang_timeout_seconds,
        )
        self._children[spec.id] = child
        self._tasks.create_task(child.run())

    def _all_processes(self) -> list[SupervisedProcess]:
        """Return all processes in the order in which they start."""
        children = list(self._children.values())
        first = [child for child in children if child.spec.role != Role.ROUTER]
        workers = [process for pools in self._pools.values() for process in pools.processes]
        return [*first, *workers, *self._routers()]

    def _all_serve(self) -> bool:
        staying = [
            keeper
            for keeper in self._all_processes()
            if not keeper.is_stopping and not (self._has_started and keeper.has_failed_to_start)
        ]
        return bool(staying) and all(keeper.is_serving for keeper in staying)

    def _on_process_change(self, keeper: SupervisedProcess) -> None:
        if keeper.has_failed_to_start and not self._has_started:
            self._failure = f"{keeper.state.id} failed to start: {keeper.state.message}"
        self._changed.set()
        self._publish_state()

    def _publish_state(self) -> None:
        """Write the state to the folder, and show it. If it can't be written, try again later."""
        state = self._current_state()
        if self._state_retry is not None:
            self._state_retry.cancel()
        try:
            self._folder.write_state(state)
        except OSError as error:
            if LOST_WRITES.record_loss(STATE_FILE):
                log.error("state_not_written", error=str(error))
            loop = asyncio.get_running_loop()
            self._state_retry = loop.call_later(STATE_RETRY_SECONDS, self._publish_state)
        else:
            if LOST_WRITES.record_success(STATE_FILE):
                log.warning("state_written")
        self._on_change(state)

    def _current_state(self) -> ClusterState:
        return ClusterState(
            supervisor_pid=os.getpid(),
            url=http_url(
                self._settings.host,
                self._launch_specs.port,
                tls=self._settings.tls_certificate is not None,
            ),
            redis_url=self._launch_specs.redis_url,
            cluster=self._settings.cluster,
            cluster_secret=self._settings.cluster_secret,
            rpc_tls_certificate=self._settings.trust.certificate,
            rpc_tls_key=self._settings.trust.key,
            rpc_tls_ca=self._settings.trust.authority,
            admin_key=self._settings.admin_key,
            tenant_secret=self._settings.tenant_secret,
            tls_certificate=self._settings.tls_certificate,
            ready=self.is_ready,
            failure=self._failure,
            obstacle=self._obstacle,
            models=dict(self._settings.served_models),
            settings=self._settings_status,
            lost_writes=dict(LOST_WRITES.counts),
            processes=[keeper.state for keeper in self._all_processes()],
        )
