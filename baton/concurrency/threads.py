"""Runs work in threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

from baton.concurrency.budget import Budget

T = TypeVar("T")

RUN_INLINE: ContextVar[bool] = ContextVar("inline", default=False)
"""Whether :func:`run_in_thread` runs its work in the event loop instead. Simulations use no
threads, so that the same seed reproduces the same run."""


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread and return its value. A thread can't be interrupted and may use the
    caller's buffers, so a cancelled caller waits for ``work`` to finish before CancelledError is
    raised."""
    if RUN_INLINE.get():
        await asyncio.sleep(0)
        return work()
    working = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        working.exception()
        raise cancelled
    return working.result()


class FairThreadPool:
    """Runs calls in threads; owners take turns. Use it on one event loop. An owner may use all
    threads but one, so that another owner's call soon gets a thread. The pool does not limit the
    number of waiting calls: each call belongs to a request in progress, whose number is limited."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._budget = Budget(num_threads, "calls", owner_limit=max(num_threads - 1, 1))

    @property
    def num_waiting(self) -> int:
        return self._budget.num_waiting

    async def run(
        self, owner: str, call: Callable[[], T], on_end: Callable[[], None] | None = None
    ) -> T:
        """Run ``call`` in a thread. If the caller is cancelled, a call that has begun continues,
        and its thread becomes free only when the call ends. ``on_end`` is called in the event loop
        once ``call`` has ended, and not at all if ``call`` never began."""
        await self._budget.wait(owner)
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, call)
        except BaseException:
            self._budget.release(1, owner)
            raise

        def end(work: "asyncio.Future[T]") -> None:
            if not work.cancelled():
                work.exception()  # mark an exception as retrieved, even if the caller is cancelled
            self._budget.release(1, owner)
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
