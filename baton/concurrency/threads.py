"""Runs work in threads that a cancelled caller waits for."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

RUN_INLINE: ContextVar[bool] = ContextVar("inline", default=False)
"""Whether to run the work in the event loop instead: simulations use no threads, so that a seed
replays them."""


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` off the event loop. A thread can't be interrupted, so a cancelled caller waits
    for it to end first: the thread uses its buffers until then."""
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
