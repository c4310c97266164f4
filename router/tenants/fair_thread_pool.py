"""A thread pool that tenants share fairly."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from baton.core.ids import TenantId

Result = TypeVar("Result")


class FairThreadPool:
    """Runs calls in threads; tenants take turns. Use it on one event loop. A tenant may use all
    threads but one, so that another tenant's call soon gets a thread. The pool does not limit the
    number of waiting calls: each call belongs to a request in progress, and the router limits the
    number of these requests."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._waiting: OrderedDict[TenantId, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting calls by tenant; the tenant whose turn is next comes first."""
        self._running: dict[TenantId, int] = {}

    async def run(
        self,
        tenant: TenantId,
        call: Callable[[], Result],
        on_end: Callable[[], None] | None = None,
    ) -> Result:
        """Run ``call`` in a thread. If the caller is cancelled, a call that has begun continues,
        and its thread becomes free only when the call ends. ``on_end`` is called in the event loop
        once ``call`` has ended, and not at all if ``call`` never began."""
        await self._wait_for_thread(tenant)
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, call)
        except BaseException:
            self._free_thread(tenant)
            raise

        def end(work: "asyncio.Future[Result]") -> None:
            if not work.cancelled():
                work.exception()  # mark an exception as retrieved, even if the caller is cancelled
            self._free_thread(tenant)
            if on_end is not None:
                on_end()

        work.add_done_callback(end)
        try:
            # Shielded because a running call can't be stopped: the thread is free when it ends.
            return await asyncio.shield(work)
        finally:
            # ``work`` may hold an exception whose traceback refers to this frame. Without ``del``,
            # this cycle would keep the request body in memory.
            del work

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def _wait_for_thread(self, tenant: TenantId) -> None:
        if self._is_free_for(tenant):
            self._begin(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove_waiter(tenant, turn)
            else:
                self._free_thread(tenant)
            raise

    def _is_free_for(self, tenant: TenantId) -> bool:
        own = self._running.get(tenant, 0)
        is_any_free = sum(self._running.values()) < self._num_threads
        return is_any_free and own < max(self._num_threads - 1, 1)

    def _begin(self, tenant: TenantId) -> None:
        self._running[tenant] = self._running.get(tenant, 0) + 1

    def _free_thread(self, tenant: TenantId) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        for chosen in list(self._waiting):
            if self._is_free_for(chosen) and self._grant(chosen):
                return

    def _grant(self, tenant: TenantId) -> bool:
        """Give the free thread to the tenant's oldest waiting call; the tenant's other calls then
        queue up behind the calls of all other tenants. Return False if no call of the tenant is
        waiting any more."""
        turns = self._waiting.pop(tenant)
        while turns:
            turn = turns.popleft()
            if turn.done():
                continue  # this waiting call was cancelled, and its task has not run since
            if turns:
                self._waiting[tenant] = turns
            self._begin(tenant)
            turn.set_result(None)
            return True
        return False

    def _remove_waiter(self, tenant: TenantId, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant)
        if turns is not None:
            with suppress(ValueError):
                turns.remove(turn)
            if not turns:
                del self._waiting[tenant]
