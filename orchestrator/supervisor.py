"""The local supervisor of ``baton up``: starts every role, keeps it alive, stops it in order."""

import asyncio
import os
from collections.abc import Callable
from functools import partial

from baton.clock import Clock
from baton.config import Settings
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role
from baton.errors import Unavailable
from baton.pools import autoscaler
from baton.pools.base import WORKER_ROLES, Pools
from baton.rpc.conductor_client import fetch_pool_plan
from baton.rpc.worker_client import convert_worker
from orchestrator.child_process import ChildProcess, ChildProcessSpec
from orchestrator.cluster_state import ClusterFolder, ClusterState
from orchestrator.launch_specs import LaunchSpecs
from orchestrator.local_pools import LocalPools
from orchestrator.preflight import (
    check_port,
    check_redis,
    http_url,
    is_router_ready,
    reachable_host,
)
from orchestrator.supervised_pools import SupervisedPools, SupervisedProcess

READY_POLL_SECONDS = 0.05
STOPPED_AFTER_POOLS = (Role.CONDUCTOR, Role.KVSTORE, Role.REDIS)
"""In this order: whoever drains finds those that it needs alive."""


class Supervisor:
    """Owns the processes of one cluster; of its workers, ``pools`` do. ``on_change`` gets every
    new state.

    Before it starts anything it checks what can be checked: the port, the Redis that was given.
    """

    def __init__(
        self,
        settings: Settings,
        folder: ClusterFolder,
        clock: Clock,
        on_change: Callable[[ClusterState], None] = lambda state: None,
        recipe: LaunchSpecs | None = None,
        pools: SupervisedPools | None = None,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._clock = clock
        self._on_change = on_change
        self._recipe = recipe or LaunchSpecs(settings, folder)
        self._pools = pools or LocalPools(
            self._recipe,
            clock,
            settings.drain_seconds,
            settings.hung_seconds,
            partial(convert_worker, trust=settings.trust),
        )
        self._children: dict[str, ChildProcess] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self._router_answered = False
        self._failure = ""

    @property
    def pools(self) -> Pools:
        return self._pools

    @property
    def ready(self) -> bool:
        """Requests are taken, and every process serves but those that are leaving."""
        return self._router_answered and self._all_serve()

    async def run(self, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
        """Starts everything, and serves until ``stop``; drains, but not after ``stop_now``.
        Raises Invalid or Unavailable when the cluster can't start; then nothing is left."""
        check_port(self._settings.host, self._settings.port)
        if not self._recipe.has_embedded_redis:
            await asyncio.to_thread(check_redis, self._recipe.redis_url)
        await self._pools.check(
            {role: getattr(self._settings, role.value) for role in WORKER_ROLES}
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await self._start_all(stop)
                    await self._serve(stop)
                finally:
                    await self._stop_all(stop_now)
        finally:
            self._tell()
        if self._failure:
            raise Unavailable(self._failure)

    # -- life -------------------------------------------------------------------------------

    async def _start_all(self, stop: asyncio.Event) -> None:
        """Redis first; the others wait for one another by themselves, side by side."""
        if self._recipe.has_embedded_redis:
            self._start(self._recipe.redis())
            await self._until(self._all_serve, stop)
        if stop.is_set() or self._failure:
            return
        if not self._settings.mock:
            self._start(self._recipe.store())
        self._start(self._recipe.conductor())
        assert self._tasks is not None
        self._pools.open(self._tasks, self._notice)
        await self._pools.scale(
            {role: getattr(self._settings, role.value) for role in WORKER_ROLES}
        )
        for router in self._recipe.routers():
            self._start(router)
        await self._until(self._all_serve, stop)
        await self._await_router(stop)

    async def _serve(self, stop: asyncio.Event) -> None:
        """Meanwhile the pools follow the load, if they are to."""
        assert self._tasks is not None
        following = self._tasks.create_task(self._follow_load())
        try:
            await self._until(lambda: False, stop)
        finally:
            following.cancel()

    async def _follow_load(self) -> None:
        if self._settings.autoscale_pools == "supervisor":
            await autoscaler.run_autoscaler(
                self._settings, self._pools, self._ask_plan, self._clock, self._pools.can_convert
            )

    async def _ask_plan(self) -> PoolPlan | None:
        address = self._children[Role.CONDUCTOR].state.address
        return await fetch_pool_plan(address, self._settings.trust) if address else None

    async def _await_router(self, stop: asyncio.Event) -> None:
        """They serve before they have heard of the workers; ready is when they have."""
        while not (stop.is_set() or self._failure):
            if await asyncio.to_thread(self._routers_answer):
                self._router_answered = True
                self._tell()
                return
            await self._clock.sleep(READY_POLL_SECONDS)

    def _routers_answer(self) -> bool:
        """Each by itself: at the one port, any may answer."""
        host, certificate = reachable_host(self._settings.host), self._settings.tls_certificate
        ports = [int(each.state.address.rpartition(":")[2] or 0) for each in self._routers()]
        return all(is_router_ready(host, port, certificate) for port in ports)

    def _routers(self) -> list[ChildProcess]:
        return [child for child in self._children.values() if child.spec.role == Role.ROUTER]

    async def _stop_all(self, stop_now: asyncio.Event) -> None:
        hurrying = asyncio.ensure_future(self._hurry(stop_now))
        self._pools.close()
        try:
            await asyncio.gather(*(router.stop() for router in self._routers()))
            await self._pools.stop()
            for role in STOPPED_AFTER_POOLS:
                await self._stop_child(role)
        finally:
            hurrying.cancel()

    async def _stop_child(self, role: Role) -> None:
        if role in self._children:
            await self._children[role].stop()

    async def _hurry(self, stop_now: asyncio.Event) -> None:
        await stop_now.wait()
        for keeper in self._keepers():
            keeper.kill()

    async def _until(self, condition: Callable[[], bool], stop: asyncio.Event) -> None:
        """Returns early when asked to stop, or when the cluster can't start."""
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
            spec, self._clock, self._notice, settings.drain_seconds, settings.hung_seconds
        )
        self._children[spec.id] = child
        self._tasks.create_task(child.run())

    def _keepers(self) -> list[SupervisedProcess]:
        """In the order in which they start."""
        children = list(self._children.values())
        first = [child for child in children if child.spec.role != Role.ROUTER]
        return [*first, *self._pools.keepers, *self._routers()]

    def _all_serve(self) -> bool:
        staying = [
            keeper
            for keeper in self._keepers()
            if not keeper.stopping and not (self._router_answered and keeper.failed_to_start)
        ]
        return bool(staying) and all(keeper.serving for keeper in staying)

    def _notice(self, keeper: SupervisedProcess) -> None:
        if keeper.failed_to_start and not self._router_answered:
            self._failure = f"{keeper.state.id} failed to start: {keeper.state.message}"
        self._changed.set()
        self._tell()

    def _tell(self) -> None:
        state = ClusterState(
            supervisor_pid=os.getpid(),
            url=http_url(
                self._settings.host,
                self._recipe.port,
                tls=self._settings.tls_certificate is not None,
            ),
            redis_url=self._recipe.redis_url,
            cluster=self._settings.cluster,
            cluster_secret=self._settings.cluster_secret,
            rpc_tls_certificate=self._settings.trust.certificate,
            rpc_tls_key=self._settings.trust.key,
            rpc_tls_ca=self._settings.trust.authority,
            admin_key=self._settings.admin_key,
            tenant_secret=self._settings.tenant_secret,
            tls_certificate=self._settings.tls_certificate,
            ready=self.ready,
            failure=self._failure,
            processes=[keeper.state for keeper in self._keepers()],
        )
        self._folder.write(state)
        self._on_change(state)
