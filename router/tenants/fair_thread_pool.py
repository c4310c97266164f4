"""Threads that tenants share: work is done in their turns."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from baton.core.ids import TenantId

Result = TypeVar("Result")


class FairThreadPool:
    """Single event loop. A tenant has all threads but one, so that another's work always finds one
    that is free soon. What waits is bounded elsewhere: each is a request under way."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._waiting: OrderedDict[TenantId, deque[asyncio.Future[None]]] = OrderedDict()
        """Those whose turn comes next first."""
        self._running: dict[TenantId, int] = {}

    async def run(
        self,
        tenant: TenantId,
        call: Callable[[], Result],
        on_end: Callable[[], None] | None = None,
    ) -> Result:
        """A thread that has begun goes on after its caller was cancelled, and is only then free for
        others. ``on_end`` is called in the event loop once the thread has ended ``call``."""
        await self._take_turn(tenant)
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, call)
        except BaseException:
            self._give_turn(tenant)
            raise

        def end(work: "asyncio.Future[Result]") -> None:
            if not work.cancelled():
                work.exception()  # nobody else asks for it once the caller has left
            self._give_turn(tenant)
            if on_end is not None:
                on_end()

        work.add_done_callback(end)
        try:
            # Shielded: the thread can't be stopped, so its end is what counts.
            return await asyncio.shield(work)
        finally:
            del work  # else an exception would hold it, and so itself, and the body

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def _take_turn(self, tenant: TenantId) -> None:
        if self._is_free_for(tenant):
            self._begin(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:
                self._give_turn(tenant)
            raise

    def _is_free_for(self, tenant: TenantId) -> bool:
        own = self._running.get(tenant, 0)
        is_any_free = sum(self._running.values()) < self._num_threads
        return is_any_free and own < max(self._num_threads - 1, 1)

    def _begin(self, tenant: TenantId) -> None:
        self._running[tenant] = self._running.get(tenant, 0) + 1

    def _give_turn(self, tenant: TenantId) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        chosen = next(filter(self._is_free_for, self._waiting), None)
        if chosen is None:
            return
        turns = self._waiting.pop(chosen)
        turn = turns.popleft()
        if turns:
            self._waiting[chosen] = turns  # behind all others
        self._begin(chosen)
        turn.set_result(None)

    def _forget(self, tenant: TenantId, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant)
        if turns is not None:
            with suppress(ValueError):
                turns.remove(turn)
            if not turns:
                del self._waiting[tenant]
