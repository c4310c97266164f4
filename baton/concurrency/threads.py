"""Runs work in threads; a cancelled caller still waits for its thread to finish."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

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
