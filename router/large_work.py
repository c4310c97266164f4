"""Work on large bodies, off the event loop: little at once, and each tenant in its turn."""

import asyncio
import ctypes
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from baton.core.ids import TenantId

LARGE_BODY_BYTES = 32 * 1024
"""Beyond, parsing and tokenising take milliseconds, and move to a thread."""

NUM_THREADS = 2
"""Each may need ten times a body's size in memory, and the event loop waits for its turn among
them. A tenant has all but one, so that another's work always finds one that is free soon."""

TRIM_BYTES = 1024 * 1024
"""After work on so much, memory that is free goes back to the system."""

TRIM_SECONDS = 2.0
"""Between two times, of some 20 ms each."""

Result = TypeVar("Result")


class LargeWork:
    """Single event loop. The bodies that wait are those of requests under way, which are counted
    and bounded elsewhere (the gate, and the budget of their bytes)."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "large-body")
        self._waiting: OrderedDict[TenantId, deque[asyncio.Future[None]]] = OrderedDict()
        """Those whose turn comes next first."""
        self._running: dict[TenantId, int] = {}
        self._trims = False

    async def run(self, tenant: TenantId, size_bytes: int, call: Callable[[], Result]) -> Result:
        """Runs ``call`` here, or in a thread when it would hold up everybody else. A thread that
        has begun goes on after its caller was cancelled, and is only then free for others."""
        if size_bytes <= LARGE_BODY_BYTES:
            return call()
        await self._take_turn(tenant)
        loop = asyncio.get_running_loop()
        try:
            work = loop.run_in_executor(self._threads, call)
        except BaseException:
            self._give_turn(tenant)
            raise
        work.add_done_callback(lambda _: self._note_end(loop, tenant, size_bytes))
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

    def _note_end(self, loop: asyncio.AbstractEventLoop, tenant: TenantId, size_bytes: int) -> None:
        self._give_turn(tenant)
        if size_bytes >= TRIM_BYTES and not self._trims:
            self._trims = True
            loop.call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        """In a thread of its own: it takes no turn from anybody."""
        self._trims = False
        threading.Thread(target=return_free_memory, name="trim", daemon=True).start()


def return_free_memory() -> None:
    """Gives free memory in the midst of the heap back to the system, where the C library can."""
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
