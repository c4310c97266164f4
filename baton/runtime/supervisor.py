"""The local supervisor of ``baton up``: starts every role, keeps it alive, stops it in order."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from baton.clock import Clock
from baton.config import Settings
from baton.core.states import Role
from baton.errors import Invalid, NotFound, Unavailable
from baton.runtime.child import Child, ChildSpec
from baton.runtime.preflight import (
    check_port,
    check_redis,
    http_url,
    reachable_host,
    router_answers,
)
from baton.runtime.recipe import POOLS, Recipe
from baton.runtime.state import ClusterFolder, ClusterState

MAX_POOL = 256
READY_POLL_SECONDS = 0.05
STOP_ORDER = ((Role.ROUTER,), POOLS, (Role.CONDUCTOR,), (Role.KVSTORE,), (Role.REDIS,))
"""So that whoever drains finds those that it needs alive."""


class Supervisor:
    """Owns the children of one cluster. ``on_change`` gets every new state.

    Before it starts anything it checks what can be checked: the port, the Redis that was given.
    """

    def __init__(
        self,
        settings: Settings,
        folder: ClusterFolder,
        clock: Clock,
        on_change: Callable[[ClusterState], None] = lambda state: None,
        recipe: Recipe | None = None,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._clock = clock
        self._on_change = on_change
        self._recipe = recipe or Recipe(settings, folder)
        self._children: dict[str, Child] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self._router_answered = False
        self._stopping = False
        self._failure = ""

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
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await self._start_all(stop)
                    await self._until(lambda: False, stop)
                finally:
                    await self._stop_all(stop_now)
        finally:
            self._tell()
        if self._failure:
            raise Unavailable(self._failure)

    # -- pools ------------------------------------------------------------------------------

    async def scale(self, wanted: dict[str, int]) -> None:
        """Adds workers, or drains and removes those that came last. Raises Invalid."""
        for name, count in wanted.items():
            if name not in [role.value for role in POOLS] or not 0 < count <= MAX_POOL:
                raise Invalid(
                    f"scale takes prefill=N and decode=N with N from 1 to {MAX_POOL}, "
                    f"not {name}={count}"
                )
        self._check_open()
        for name, count in wanted.items():
            self._forget_failed(name)
            present = self._workers(name)
            for _ in range(count - len(present)):
                self._start(self._recipe.worker(Role(name)))
            for child in present[count:]:
                self._retire(child)

    async def drain(self, worker_id: str) -> None:
        """Drains and removes one worker. Raises NotFound; Invalid for the last of its pool."""
        self._check_open()
        child = self._children.get(worker_id)
        if child is None or Role(child.spec.role) not in POOLS:
            raise NotFound(f"there is no worker {worker_id!r}")
        if child.stopping:
            return
        if self._workers(child.spec.role) == [child]:
            raise Invalid(f"{worker_id} is the last {child.spec.role} worker")
        self._retire(child)

    def _check_open(self) -> None:
        if self._stopping or self._tasks is None:
            raise Unavailable("the cluster is starting or stopping")

    def _retire(self, child: Child) -> None:
        assert self._tasks is not None
        self._tasks.create_task(self._remove(child))

    async def _remove(self, child: Child) -> None:
        await child.stop()
        self._children.pop(child.spec.id, None)
        self._notice(child)

    def _forget_failed(self, role: str) -> None:
        for child in list(self._children.values()):
            if child.spec.role == role and child.failed_to_start:
                del self._children[child.spec.id]

    def _workers(self, role: str) -> list[Child]:
        """Those that stay."""
        return [
            child
            for child in self._children.values()
            if child.spec.role == role and not child.stopping and not child.failed_to_start
        ]

    # -- life -------------------------------------------------------------------------------

    async def _start_all(self, stop: asyncio.Event) -> None:
        """Redis first; the others wait for one another by themselves, side by side."""
        if self._recipe.has_embedded_redis:
            self._start(self._recipe.redis())
            await self._until(self._all_serve, stop)
        if stop.is_set() or self._failure:
            return
        self._start(self._recipe.store())
        self._start(self._recipe.conductor())
        for role in POOLS:
            for _ in range(getattr(self._settings, role.value)):
                self._start(self._recipe.worker(role))
        self._start(self._recipe.router())
        await self._until(self._all_serve, stop)
        await self._await_router(stop)

    async def _await_router(self, stop: asyncio.Event) -> None:
        """It serves before it has heard of the workers; ready is when it has."""
        host, port = reachable_host(self._settings.host), self._recipe.port
        while not (stop.is_set() or self._failure):
            if await asyncio.to_thread(router_answers, host, port):
                self._router_answered = True
                self._tell()
                return
            await self._clock.sleep(READY_POLL_SECONDS)

    async def _stop_all(self, stop_now: asyncio.Event) -> None:
        self._stopping = True
        hurrying = asyncio.ensure_future(self._hurry(stop_now))
        try:
            for roles in STOP_ORDER:
                leaving = [c for c in self._children.values() if Role(c.spec.role) in roles]
                await asyncio.gather(*(child.stop() for child in leaving))
        finally:
            hurrying.cancel()

    async def _hurry(self, stop_now: asyncio.Event) -> None:
        await stop_now.wait()
        for child in self._children.values():
            child.kill()

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

    def _start(self, spec: ChildSpec) -> None:
        assert self._tasks is not None
        child = Child(spec, self._clock, self._notice, self._settings.drain_seconds)
        self._children[spec.id] = child
        self._tasks.create_task(child.run())

    def _all_serve(self) -> bool:
        staying = [
            child
            for child in self._children.values()
            if not child.stopping and not (self._router_answered and child.failed_to_start)
        ]
        return bool(staying) and all(child.serving for child in staying)

    def _notice(self, child: Child) -> None:
        if child.failed_to_start and not self._router_answered:
            reason = child.state.message or last_line(child.spec.log)
            self._failure = f"{child.spec.id} failed to start: {reason}"
        self._changed.set()
        self._tell()

    def _tell(self) -> None:
        state = ClusterState(
            supervisor_pid=os.getpid(),
            url=http_url(self._settings.host, self._recipe.port),
            redis_url=self._recipe.redis_url,
            cluster=self._settings.cluster,
            cluster_secret=self._settings.cluster_secret,
            admin_key=self._settings.admin_key,
            tenant_secret=self._settings.tenant_secret,
            ready=self.ready,
            failure=self._failure,
            processes=[child.state for child in self._children.values()],
        )
        self._folder.write(state)
        self._on_change(state)


def last_line(log_file: Path) -> str:
    """What a process said last."""
    try:
        lines = log_file.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1].removeprefix("baton: ") if lines else f"it said nothing; see {log_file}"
