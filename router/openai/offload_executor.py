"""Work on large bodies, off the event loop: little at once, and each tenant in its turn."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from baton.core.ids import TenantId
from baton.system.heap import trim_heap
from router.tenants.fair_thread_pool import FairThreadPool

MIN_OFFLOAD_BYTES = 32 * 1024
"""Beyond, parsing and tokenising take milliseconds, and move to a thread."""

NUM_THREADS = 2
"""Each may need ten times a body's size in memory, and the event loop waits for its turn among
them."""

TRIM_BYTES = 1024 * 1024
"""After work on so much, memory that is free goes back to the system."""

TRIM_SECONDS = 2.0
"""Between two times, of some 20 ms each."""

Result = TypeVar("Result")


class OffloadExecutor:
    """Single event loop. The bodies that wait are counted and bounded by the gate, and by the
    budget of their bytes."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._threads = FairThreadPool(num_threads, "large-body")
        self._trims = False

    async def run(self, tenant: TenantId, size_bytes: int, call: Callable[[], Result]) -> Result:
        """Runs ``call`` here, or in a thread when it would hold up everybody else."""
        if size_bytes <= MIN_OFFLOAD_BYTES:
            return call()
        trim = partial(self._trim_later, size_bytes)
        try:
            return await self._threads.run(tenant, call, on_end=trim)
        finally:
            trim()  # the body of who left before its turn

    @property
    def num_waiting(self) -> int:
        return self._threads.num_waiting

    def _trim_later(self, size_bytes: int) -> None:
        if size_bytes >= TRIM_BYTES and not self._trims:
            self._trims = True
            asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        """In a thread of its own: it takes no turn from anybody."""
        self._trims = False
        threading.Thread(target=trim_heap, name="trim", daemon=True).start()
