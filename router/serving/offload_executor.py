"""Runs work on large bodies in threads, off the event loop, fairly between tenants."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from baton.concurrency.threads import FairThreadPool
from baton.core.ids import TenantId
from baton.system.heap import trim_heap
from router.tenants.fair_turns import FairTurns

MIN_OFFLOAD_BYTES = 32 * 1024
"""Larger bodies are parsed and tokenised in a thread, since that takes milliseconds."""

NUM_THREADS = 2
"""The number of threads is small, since a call may need ten times the body's size in memory, and
the threads compete with the event loop for the interpreter lock."""

MIN_TRIM_BYTES = 1024 * 1024
"""After work on a body of at least this size, free heap memory is returned to the operating
system."""

TRIM_DELAY_SECONDS = 2.0
"""The delay until heap memory is returned to the operating system. It lets several large bodies
share one return, which takes some 20 ms."""

Result = TypeVar("Result")


class OffloadExecutor:
    """Runs a call in the event loop if it works on a small body, and in a thread if it works on a
    large one. Use it on one event loop. The number and the total size of the bodies that wait for a
    thread are bounded elsewhere, by the request limiter and the body budget."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._threads = FairThreadPool(num_threads, "large-body")
        self._turns = FairTurns()
        self._is_trim_scheduled = False

    async def run(self, tenant: TenantId, size_bytes: int, call: Callable[[], Result]) -> Result:
        """Run ``call`` in the event loop, or in a thread if the body is large."""
        if size_bytes <= MIN_OFFLOAD_BYTES:
            return call()
        trim = partial(self._schedule_trim, size_bytes)
        try:
            return await self._threads.run(tenant, call, on_end=trim)
        finally:
            trim()  # in case the request was cancelled while it waited for a thread

    async def tokenize(
        self, model: str, tenant: TenantId, size_bytes: int, call: Callable[[], Result]
    ) -> Result:
        """Run ``call``, which tokenises a prompt for ``model``, as :meth:`run` does. Small prompts
        take turns in the event loop (:class:`FairTurns`)."""
        if size_bytes <= MIN_OFFLOAD_BYTES:
            await self._turns.wait(model, tenant, size_bytes)
        return await self.run(tenant, size_bytes, call)

    @property
    def num_waiting(self) -> int:
        return self._threads.num_waiting + self._turns.num_waiting

    def _schedule_trim(self, size_bytes: int) -> None:
        if size_bytes >= MIN_TRIM_BYTES and not self._is_trim_scheduled:
            self._is_trim_scheduled = True
            asyncio.get_running_loop().call_later(TRIM_DELAY_SECONDS, self._trim)

    def _trim(self) -> None:
        """Trim the heap in a thread of its own, so that it delays no request."""
        self._is_trim_scheduled = False
        threading.Thread(target=trim_heap, name="trim", daemon=True).start()
