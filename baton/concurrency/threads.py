"""Work that must not be left behind half done."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

RUN_INLINE: ContextVar[bool] = ContextVar("inline", default=False)
"""In a simulation there are no threads, so that its seed replays it."""


async def run_in_thread(work: Callable[[], T]) -> T:
    """Runs ``work`` off the event loop. A thread can't be interrupted, so a caller that is
    cancelled waits for its end first: what it works on is not free before."""
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
