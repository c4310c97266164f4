"""Workers as actors of a Ray cluster, each with resources of its own, on whatever node has them.

Ray starts an actor anew when it or its node dies; the actor starts its worker anew when that one
dies (:mod:`orchestrator.ray.actor`). When the supervisor goes, the actors go.
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

LOOK_SECONDS = 1.0
"""Between two looks at what a worker waits for."""

ANSWER_SECONDS = 5.0
"""For an actor to tell that its worker has stopped."""

log = structlog.get_logger(__name__)


class RayPools(SupervisedPools):
    def __init__(self, recipe: LaunchSpecs, cluster: RayCluster, clock: Clock) -> None:
        super().__init__()
        self._recipe = recipe
        self._cluster = cluster
        self._clock = clock

    async def check(self, sizes: Mapping[Role, int]) -> None:
        await self._cluster.check(sum(sizes.values()))

    def _keeper(self, role: Role, on_change: OnChange) -> SupervisedProcess:
        return RayWorkerProcess(self._recipe.order(role), self._cluster, self._clock, on_change)


class RayWorkerProcess:
    """Keeps one actor after the other, until told to stop."""

    def __init__(
        self, order: RemoteWorkerSpec, cluster: RayCluster, clock: Clock, on_change: OnChange
    ) -> None:
        self.state = ProcessState(order.id, order.role, 0, "pending")
        self._order = order
        self._cluster = cluster
        self._clock = clock
        self._on_change = on_change
        self._placing: asyncio.Future[PlacedActor] | None = None
        self._answers = False
        self._has_served = False
        self._failed = False
        self._num_lost = 0
        self._num_restarts = 0
        self._stop_asked = asyncio.Event()
        self._give_up = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def serving(self) -> bool:
        return self.state.state == "serving"

    @property
    def stopping(self) -> bool:
        return self._stop_asked.is_set()

    @property
    def failed_to_start(self) -> bool:
        return self._ended.is_set() and self._failed and not self.stopping

    async def run(self) -> None:
        living = asyncio.ensure_future(self._live_on())
        giving_up = asyncio.ensure_future(self._give_up.wait())
        try:
            await asyncio.wait([living, giving_up], return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                living.result()
        finally:
            living.cancel()
            giving_up.cancel()
            await asyncio.wait([living, giving_up])
            await self._let_go()
            self._ended.set()
            self._move("stopped" if self.stopping else "failed")

    async def stop(self) -> None:
        """Asks its actor to drain; gives up the actor when that takes too long."""
        self._stop_asked.set()
        if self._ended.is_set():
            return
        self._move("draining")
        if not self._answers:
            self._give_up.set()
        asking = asyncio.ensure_future(self._ask_to_stop())
        try:
            async with asyncio.timeout(self._order.drain_seconds + STOP_SECONDS + ANSWER_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            log.warning("killed", id=self._order.id, reason="it took too long to stop")
            self.kill()
            await self._ended.wait()
        finally:
            asking.cancel()

    def kill(self) -> None:
        self._give_up.set()

    # -- one actor after the other ------------------------------------------------------------

    async def _live_on(self) -> None:
        while not (self.stopping or self._failed):
            try:
                await self._live()
            except ActorLost as lost:
                if self.stopping:
                    return
                await self._replace(str(lost))

    async def _live(self) -> None:
        """Until its worker has ended for good. Raises ActorLost when Ray has given it up."""
        self._placing = asyncio.ensure_future(self._cluster.place(self._order))
        placed, seen = await asyncio.shield(self._placing), -1
        while True:
            try:
                news = await self._news(placed, seen)
            except ActorLost as lost:
                if lost.for_good or self.stopping:
                    raise
                if self._answers:
                    self._tell_restart(str(lost))
                else:
                    await self._tell_wait(placed)
                await self._clock.sleep(LOOK_SECONDS)
                seen = -1
                continue
            seen = news["number"]
            self._take(placed, news)
            if news["ended"]:
                self._failed = news["failed_to_start"]
                return

    async def _news(self, placed: PlacedActor, seen: int) -> dict[str, Any]:
        """What the actor tells next; until it answers at all, what it waits for."""
        asking = asyncio.ensure_future(self._cluster.ask(placed, "follow", seen))
        try:
            while not (await asyncio.wait([asking], timeout=LOOK_SECONDS))[0]:
                if not self._answers:
                    await self._tell_wait(placed)
            news: dict[str, Any] = asking.result()
            return news
        finally:
            asking.cancel()

    async def _replace(self, why: str) -> None:
        """After an actor that Ray has given up; a worker that never served fails in the end."""
        self._tell_restart(why)
        await self._let_go()
        self._num_lost += 1
        self._failed = not self._has_served and self._num_lost >= START_ATTEMPTS
        if not self._failed:
            seconds = BACKOFF_SECONDS[min(self._num_lost, len(BACKOFF_SECONDS)) - 1]
            await self._clock.sleep(seconds)

    async def _let_go(self) -> None:
        placing, self._placing = self._placing, None
        if placing is not None:
            with contextlib.suppress(ActorLost):
                await self._cluster.let_go(await placing)

    async def _ask_to_stop(self) -> None:
        if self._placing is not None and self._placing.done():
            with contextlib.suppress(ActorLost):
                await self._cluster.ask(self._placing.result(), "stop")

    # -- what is told -------------------------------------------------------------------------

    def _take(self, placed: PlacedActor, news: dict[str, Any]) -> None:
        told = ProcessState(**news["state"])
        self._cluster.settle(placed, news["node_id"])
        elsewhere = self._cluster.networked and news["ip"] != self._cluster.host
        told.node = news["ip"] if elsewhere else ""
        told.restarts += self._num_restarts
        self._answers = True
        self._has_served = self._has_served or told.state == "serving"
        self.state = told
        self._move(told.state)

    async def _tell_wait(self, placed: PlacedActor) -> None:
        self.state.message = await self._cluster.waits_for(placed)
        self._move("pending" if self.state.message else "starting")

    def _tell_restart(self, why: str) -> None:
        log.warning("actor_lost", id=self._order.id, reason=why)
        self._answers = False
        self._num_restarts += 1
        restarts = self.state.restarts + 1
        self.state = ProcessState(
            self._order.id, self._order.role, 0, "restarting", restarts=restarts, message=why
        )
        self._move("restarting")

    def _move(self, state: str) -> None:
        leaves = self.stopping and state not in ("stopped", "failed")
        self.state.state = "draining" if leaves else state
        self._on_change(self)
